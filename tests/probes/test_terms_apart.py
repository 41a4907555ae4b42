"""Terms that nobody declared are one number: what follows the pass or the rank, and no count, leaves a step open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.losses.terms_apart import Name, TermWeights, _follows
from gradcheck_dist.stream.diagnose import diagnose_run

PASSES, STEPS = 3, 2
Weight = Callable[[int, int, int, int], float]
"""Of the term in a pass of a step, given the pass, the step, the tokens of the pass and of the step."""


def run_of(folder: Path, weight: Weight) -> Report:
    """Two steps of three passes each, of unequal numbers of tokens, with a penalty beside the cross-entropy."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_dist.attach(folder):
        for step in range(STEPS):
            counts = [int(count) for count in torch.randint(3, 30, (PASSES,))]
            for k, count in enumerate(counts):
                logits = model(torch.randn(count, 4))
                main = F.cross_entropy(logits, torch.randint(5, (count,)), reduction="sum") / sum(counts)
                factor = weight(k, step, count, sum(counts))
                (main + 0.1 * factor * logits.abs().mean() if factor else main).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(folder)


@pytest.mark.parametrize(
    ("weight", "levels"),
    [
        (lambda k, step, n, total: k + 1, "0.3333, 0.6667, 1"),
        (lambda k, step, n, total: 2 if k == PASSES - 1 else 1, "0.5, 1"),
        (lambda k, step, n, total: k != 1, "0, 1"),
        (lambda k, step, n, total: (2 if k else 1) / (step + 1), "0.5, 1"),
    ],
)
def test_a_coefficient_that_follows_the_pass_leaves_steps_open(tmp_path: Path, weight: Weight, levels: str) -> None:
    report = run_of(tmp_path / "run", weight)
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert f"weighs {levels} of its largest weight" in reason and "follows the accumulation step" in reason
    assert "one coefficient on all ranks and in all passes" in report.next_step


@pytest.mark.parametrize(
    "weight",
    [
        lambda k, step, n, total: 1,
        lambda k, step, n, total: 1 / (step + 1),  # a schedule
        lambda k, step, n, total: n / total,
        lambda k, step, n, total: 1 / n,
        lambda k, step, n, total: k == PASSES - 1,  # once a step
        lambda k, step, n, total: (PASSES * step + k + 1) / 10,  # warmed up by passes
        lambda k, step, n, total: (k + step) % 2 + 1,  # a source's own, now here and now there
    ],
)
def test_one_coefficient_a_count_or_a_schedule_is_clean(tmp_path: Path, weight: Weight) -> None:
    report = run_of(tmp_path / "run", weight)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def steps_of(*weights: float, tokens: tuple[float, ...] = (5.0, 7.0, 6.0, 9.0)) -> list[TermWeights]:
    """Two steps alike of two ranks with two passes each; weights of rank 0, then of rank 1."""
    keys = [(rank, k, 0) for rank in range(2) for k in range(2)]
    counts = dict(zip(keys, tokens, strict=True))
    term = Name(0, "mean", "train.py", 7)
    return [TermWeights(term, None, dict(zip(keys, weights, strict=True)), counts, counts, 1e-3)] * 2


@pytest.mark.parametrize(
    ("weights", "follows"),
    [
        ((1, 1, 2, 2), "rank"),
        ((1, 1, 0, 0), "rank"),
        ((1, 2, 1, 2), "accumulation step"),
        ((1, 2, 2, 1), "rank and accumulation step"),
        ((1, 1, 1, 1), ""),
        ((0, 1, 0, 1), ""),  # once a step
        ((5, 7, 6, 9), ""),
        ((1 / 12, 1 / 12, 1 / 15, 1 / 15), ""),  # over each rank's tokens
        ((5 / 11, 7 / 16, 6 / 11, 9 / 16), ""),  # its share of the accumulation step's
    ],
)
def test_what_a_term_follows(weights: tuple[float, ...], follows: str) -> None:
    assert _follows(steps_of(*weights)) == follows


def test_what_is_another_pattern_in_the_next_step_follows_nothing() -> None:
    assert _follows([steps_of(1, 1, 2, 2)[0], steps_of(2, 2, 1, 1)[0]]) == ""
    assert _follows([steps_of(1, 1, 2, 2)[0], steps_of(1, 1, 1, 1)[0]]) == ""


def test_losses_of_less_precision_are_compared_as_roughly() -> None:
    first, _ = steps_of(1, 1, 1.02, 1.02)
    rough = TermWeights(first.name, None, first.weights, first.tokens, first.labels, 0.03)
    assert _follows([first, first]) == "rank"
    assert _follows([rough, rough]) == ""
