"""Lines of the trainer's own that multiply gradients by numbers which differ between ranks or parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from random_trainers import global_mean
from reduced_steps import ended
from simulated_step import _backward, _scale, _schedule_ends
from simulator import Hand, Process, Trainer, World

from gradcheck_dist.diagnosis.engine import conclude
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.events import GradWrite

COUNT_LINE, CLIP_LINE = 31, 35
Line = tuple[int, Callable[[World, Process, str], float]]
"""The number of a line, and by what it multiplies a rank's gradient of some name."""


def judged(lines: Sequence[Line]) -> Report:
    """Bare sums of two stages, which an average over two data ranks reduces; then these lines of the trainer's."""
    world = World(Trainer(root=lambda *_: 1.0, data_ranks=2, accumulation=2, microbatches=4, stages=2), 3)
    for k in range(2):
        for m in range(4):
            _backward(world, k, m)
        _schedule_ends(world, k)
    for line, factor in lines:
        for rank in world.ranks:
            for name in rank.ids:
                number = factor(world, rank, name)
                _scale(world, rank, number, [name])
                if number != 1:
                    rank.emit(GradWrite, line=line, params=rank.param_set([name]), factor=number)
    return ended(world)


def own_tokens(world: World, rank: Process) -> int:
    return sum(count for key, count in world.num_tokens.items() if key[0] == rank.data_rank)


BY_ALL: Line = (COUNT_LINE, lambda world, rank, name: 2 / sum(world.num_tokens.values()))
BY_OWN: Line = (COUNT_LINE, lambda world, rank, name: 2 / own_tokens(world, rank))
CLIP: Line = (CLIP_LINE, lambda world, rank, name: 0.07413)


def test_a_division_by_the_tokens_of_all_ranks_is_clean() -> None:
    assert judged([BY_ALL]).verdict == "clean"


@pytest.mark.parametrize("lines", [[BY_OWN], [BY_OWN, CLIP], [CLIP, BY_OWN]])
def test_a_count_of_each_ranks_own_is_one_fault_of_its_line_with_a_clip_beside_it_too(lines: list[Line]) -> None:
    (finding,) = judged(lines).findings
    assert finding.code == "GS305"
    assert finding.first_event is not None and finding.first_event.line == COUNT_LINE


@pytest.mark.parametrize("num_steps", [2, 4])
def test_a_number_that_the_same_counts_make_in_several_steps_is_no_function_of_the_gradients(num_steps: int) -> None:
    """Sums over tokens that are divided by passes and ranks: one step alone would show this by chance."""
    trainer, verdicts = Trainer(root=global_mean(1.0), op="sum", accumulation=3), []
    for step in range(num_steps):
        total = sum(World(trainer, step).num_tokens.values())
        run = World(replace(trainer, hands=(Hand("before_optimizer", total / 6),)), step).run()
        verdict = judge_step(run, 0, "global-token-mean", "given")
        verdict.context = replace(verdict.context, step=step)
        for finding in (*verdict.findings, *(change.finding for change in verdict.changes)):
            finding.step, finding.steps = step, [step]
        verdicts.append(verdict)
    report = conclude(run, verdicts, [], "global-token-mean", "given")
    assert report.verdict == ("findings" if num_steps > 2 else "undetermined")
    for finding in report.findings:
        assert finding.factor.expression == "num_tokens/(accumulation_steps * dp_replicate)"


def test_the_number_by_which_weights_come_right_is_that_of_the_wrong_gradients() -> None:
    """One line, by a right number for some parameters and by a third of it for others."""

    def by_group(world: World, rank: Process, name: str) -> float:
        return 2 / sum(world.num_tokens.values()) / (3 if name == "norm.weight" else 1)

    (finding,) = judged([(COUNT_LINE, by_group)]).findings
    assert (finding.num_parameters, finding.first_event and finding.first_event.line) == (2, COUNT_LINE)
    assert finding.first_event is not None and finding.first_event.nominal_factor is not None
    right = finding.first_event.nominal_factor * 3
    assert f"multiply by {right:.6g}" in finding.fix and f"where x {right:.6g} would make" in finding.explanation
