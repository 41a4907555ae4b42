"""Means over each rank's tokens that a line of the trainer's weighs by these tokens again: what is wrong is told once,
where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from reduced_steps import all_reduce, ended
from simulated_step import _backward, _scale
from simulator import Key, Trainer, World

from gradcheck_dist.diagnosis.engine import conclude
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.events import GradWrite

WEIGH_LINE, REDUCE_LINE, DIVIDE_LINE, HALVE_LINE = 31, 32, 33, 34
Tokens = dict[Key, int]


def of_rank(rank: int, tokens: Tokens) -> int:
    return sum(count for key, count in tokens.items() if key[0] == rank)


def last_of_rank(rank: int, tokens: Tokens) -> int:
    return tokens[rank, 1, 0]


def mean_of_rank(key: Key, tokens: Tokens) -> float:
    return 1 / of_rank(key[0], tokens)


def mean_of_means(key: Key, tokens: Tokens) -> float:
    return 0.5 / tokens[key]


def judged(
    root: Callable[[Key, Tokens], float],
    weigh: Callable[[int, Tokens], float] = of_rank,
    divisor: Callable[[Tokens], float] = lambda tokens: sum(tokens.values()),
    spared: str = "",
    halved: str = "",
) -> Report:
    """Two ranks of two passes: each rank's gradients are weighed, but for one that is spared, summed by hand and
    divided; one may be halved besides."""
    world = World(Trainer(root=root, impl="none", data_ranks=2, accumulation=2), 7)
    for k in range(2):
        _backward(world, k, 0)
    for rank in world.ranks:
        _write(
            world,
            rank.rank,
            weigh(rank.data_rank, world.num_tokens),
            WEIGH_LINE,
            [name for name in rank.ids if name != spared],
        )
    all_reduce(world, ((0, 1),), REDUCE_LINE)
    for rank in world.ranks:
        _write(world, rank.rank, 1 / divisor(world.num_tokens), DIVIDE_LINE, list(rank.ids))
        if halved:
            _write(world, rank.rank, 0.5, HALVE_LINE, [halved])
    return ended(world)


def _write(world: World, at: int, number: float, line: int, names: list[str]) -> None:
    rank = world.ranks[at]
    _scale(world, rank, number, names)
    rank.emit(GradWrite, line=line, params=rank.param_set(names), factor=number)


def weighed_by_last_pass(key: Key, tokens: Tokens) -> float:
    return 2 * last_of_rank(key[0], tokens) / tokens[key] / sum(tokens.values())


def the_one(report: Report) -> Finding:
    (finding,) = report.findings
    return finding


def test_ranks_that_are_weighed_by_their_tokens_are_right() -> None:
    assert judged(mean_of_rank).verdict == "clean"


def test_means_of_passes_are_the_losses_fault_and_not_that_of_lines_that_count_right() -> None:
    finding = the_one(judged(mean_of_means))
    assert (finding.code, finding.first_event and finding.first_event.kind) == ("GS301", "loss")
    assert "weighs ranks by their tokens" in finding.explanation


def test_a_wrong_total_is_no_fault_of_the_line_that_weighs() -> None:
    finding = the_one(judged(mean_of_rank, divisor=lambda tokens: sum(tokens.values()) * 1.25))
    assert finding.factor.observed == pytest.approx(0.8, rel=1e-5)
    event = finding.first_event
    assert event is not None and (event.line == DIVIDE_LINE or (event.kind == "loss" and event.before is not None))


def test_another_count_in_the_place_of_a_ranks_tokens_is_no_mean_of_rank_means() -> None:
    report = judged(mean_of_rank, weigh=last_of_rank)
    assert report.verdict != "clean"
    assert "GS302" not in {finding.code for finding in report.findings}


def test_means_that_the_last_pass_of_their_rank_weighs_are_no_coefficients() -> None:
    verdicts = []
    for step in range(4):
        run = World(Trainer(root=weighed_by_last_pass, accumulation=2), step).run()
        verdict = judge_step(run, 0, "global-token-mean", "given")
        verdict.context = replace(verdict.context, step=step)
        for finding in verdict.findings:
            finding.step, finding.steps = step, [step]
        verdicts.append(verdict)
    finding = the_one(conclude(run, verdicts, [], "global-token-mean", "given"))
    assert finding.first_event is not None and finding.first_event.kind == "loss"


def test_one_parameter_that_is_not_weighed_is_one_fault_and_another_one_that_is_halved_too() -> None:
    finding = the_one(judged(mean_of_rank, spared="norm.weight"))
    assert (finding.num_parameters, finding.code) == (1, "GS000")
    finding = the_one(judged(mean_of_rank, halved="embed.weight"))
    assert (finding.num_parameters, finding.factor.observed) == (1, pytest.approx(0.5))
    halves = judged(mean_of_means, halved="embed.weight").findings
    assert {finding.code for finding in halves} == {"GS301", "GS000"}
    assert {finding.first_event and finding.first_event.line for finding in halves} == {12, HALVE_LINE}
