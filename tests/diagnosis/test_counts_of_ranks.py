"""Ranks that divide their losses by counts of their own, of more tokens than enter them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from simulator import Key, Trainer, World, param_table

from gradcheck_dist.diagnosis.engine import conclude
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.judging import judge_step

TOKENS = ((9, 5, 6, 11), (7, 12, 9, 4), (14, 3, 10, 10))
"""By step, of passes (rank 0, rank 0, rank 1, rank 1)."""


def judged(root: Callable[[Key, dict[Key, int]], float]) -> Report:
    verdicts, runs = [], []
    for step, tokens in enumerate(TOKENS):
        trainer = Trainer(root=root, accumulation=2)
        world = World(trainer, seed=step)
        world.num_tokens = dict(zip(trainer.keys, tokens, strict=True))
        world.token_gradients = {(0, name): world._gradients(name, size) for name, size in param_table(trainer)}
        runs.append(world.run())
        verdict = judge_step(runs[-1], 0, "global-token-mean", "assumed")
        verdict.context = replace(verdict.context, step=step)
        for finding in verdict.findings:
            finding.step, finding.steps = step, [step]
        verdicts.append(verdict)
    return conclude(runs[0], verdicts, [], "global-token-mean", "assumed")


def of_rank(key: Key, tokens: dict[Key, int]) -> int:
    return sum(count for other, count in tokens.items() if other[0] == key[0])


def test_labels_before_their_shift_are_counted_by_each_rank() -> None:
    """One label of each pass never enters the loss, as of a model of one's own below transformers' Trainer."""
    report = judged(lambda key, tokens: 1 / (of_rank(key, tokens) + 2))
    (finding,) = report.findings
    assert (finding.code, finding.steps) == ("GS000", [0, 1, 2])
    assert "a count of its own, of more tokens than enter them: 16 for 14, 19 for 17" in finding.explanation
    assert "labels before a shift" in finding.fix


@pytest.mark.parametrize("coefficients", [(1.0, 0.5), (2.0, 1.0), (1.0, 0.8)])
def test_coefficients_of_sources_stay_open(coefficients: Sequence[float]) -> None:
    def root(key: Key, tokens: dict[Key, int]) -> float:
        of_source = coefficients[(key[0] + sum(tokens.values())) % 2]
        return 2 * of_source / sum(tokens.values())

    assert judged(root).findings == []
