"""One fault is one finding, also where a step shows it otherwise: without tokens on a rank, by a count that is a power
of two, or by the count of another step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from reduced_steps import all_reduce
from simulated_step import _backward, _scale
from simulator import BEFORE, Key, OptimizerStep, Trainer, World, param_table

from gradcheck_dist.diagnosis.engine import conclude
from gradcheck_dist.diagnosis.finding import Finding, FirstEvent
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.one_law import tell_one_law
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause, merged
from gradcheck_dist.events import GradWrite
from gradcheck_dist.trace.run import Run

LINE = 41
Tokens = dict[Key, int]


def world_of(step: int, trainer: Trainer, tokens: Sequence[int]) -> World:
    world = World(trainer, seed=step)
    world.num_tokens = dict(zip(trainer.keys, tokens, strict=True))
    world.token_gradients = {(0, name): world._gradients(name, size) for name, size in param_table(trainer)}
    return world


def verdict_on(step: int, run: Run) -> StepVerdict:
    verdict = judge_step(run, 0, "global-token-mean", "assumed")
    verdict.context = replace(verdict.context, step=step)
    for finding in verdict.findings:
        finding.step, finding.steps = step, [step]
    return verdict


def the_one(verdicts: list[StepVerdict], run: Run) -> Finding:
    (finding,) = conclude(run, verdicts, [], "global-token-mean", "assumed").findings
    return finding


def of_rank(key: Key, tokens: Tokens) -> float:
    return 1 / max(sum(count for other, count in tokens.items() if other[0] == key[0]), 1)


def of_pass(key: Key, tokens: Tokens) -> float:
    return 0.5 / max(tokens[key], 1)


@pytest.mark.parametrize(("root", "code"), [(of_rank, "GS302"), (of_pass, "GS301")])
def test_means_are_averaged_over_ranks_without_tokens_too(root: Callable[[Key, Tokens], float], code: str) -> None:
    trainer = Trainer(root=root, accumulation=2)
    runs = [world_of(step, trainer, tokens).run() for step, tokens in enumerate([(9, 5, 6, 11), (0, 0, 13, 8)])]
    verdicts = [verdict_on(step, run) for step, run in enumerate(runs)]
    assert [one.code for one in verdicts[1].findings] != [code]
    finding = the_one(verdicts, runs[0])
    assert (finding.code, finding.steps) == (code, [0, 1])


def test_a_step_whose_ranks_hold_tokens_in_one_pass_each_shows_both_means() -> None:
    trainer = Trainer(root=of_rank, accumulation=2)
    tokens = [(9, 5, 6, 11), (9, 0, 0, 11), (7, 12, 9, 5)]
    verdicts = [verdict_on(step, world_of(step, trainer, one).run()) for step, one in enumerate(tokens)]
    assert [one.code for verdict in verdicts for one in verdict.findings] == ["GS302", "GS301", "GS302"]
    (finding,) = told(verdicts)
    assert (finding.code, finding.steps) == ("GS302", [0, 1, 2])


def divided(step: int, tokens: Sequence[int], divisor: float) -> Run:
    """Bare sums over tokens, which a recorded line divides behind their sum over ranks."""
    world = world_of(step, Trainer(root=lambda *_: 1.0, impl="none", accumulation=2), tokens)
    for k in range(2):
        _backward(world, k, 0)
    all_reduce(world, ((0, 1),), LINE - 1)
    return _divide(world, divisor)


def halved(step: int, tokens: Sequence[int]) -> Run:
    """The sum of passes' means, of all ranks' tokens and averaged over ranks, which a recorded line halves."""
    passes = len(tokens) // 2
    world = world_of(
        step, Trainer(root=lambda _, counts: 2 * passes / sum(counts.values()), accumulation=passes), tokens
    )
    for k in range(passes):
        _backward(world, k, 0)
    return _divide(world, 2.0)


def _divide(world: World, divisor: float) -> Run:
    for rank in world.ranks:
        _scale(world, rank, 1 / divisor, list(rank.ids))
        rank.emit(GradWrite, line=LINE, params=rank.everything, factor=1 / divisor)
        seq = rank.next_seq()
        rank.sample_grads(seq, BEFORE, list(rank.ids))
        rank.emit(OptimizerStep, seq=seq, optimizer="SGD", params=rank.everything)
        rank.flush()
    run = Run(Path("simulated"), {"world_size": 2})
    run.ranks = {rank.rank: rank.trace for rank in world.ranks}
    return run


def test_a_line_that_divides_by_the_tokens_of_the_step_before_is_told_there() -> None:
    tokens = [(9, 5, 6, 11), (7, 12, 9, 4), (14, 3, 10, 10), (5, 8, 13, 9)]
    counts = [sum(one) for one in tokens]
    runs = [divided(step, tokens[step], counts[max(step - 1, 0)]) for step in range(4)]
    finding = the_one([verdict_on(step, run) for step, run in enumerate(runs)], runs[0])
    assert finding.steps == [1, 2, 3]
    assert finding.first_event is not None and finding.first_event.line == LINE
    assert finding.factor.expression == "num_tokens/num_tokens of step 0"


def told_otherwise(verdict: StepVerdict, **changes: object) -> StepVerdict:
    """The same verdict, whose one finding reads otherwise."""
    (found,) = verdict.findings
    other = msgspec.structs.replace(found, **changes)
    verdict.shapes[cause(other)] = verdict.shapes[cause(found)]
    verdict.findings = [other]
    return verdict


@pytest.mark.parametrize(("of_line", "line"), [(1, None), (3, LINE)])
def test_a_line_and_what_is_between_two_events_around_it_are_told_as_in_most_steps(
    of_line: int, line: int | None
) -> None:
    around = FirstEvent(rank=0, seq=0, kind="loss", unrecorded=True, before={"kind": "norm", "seq": 10**6})
    tokens = [(9, 5, 6, 11), (7, 12, 9, 5), (14, 3, 10, 10), (5, 8, 13, 9), (6, 6, 14, 8)]
    verdicts = [verdict_on(step, divided(step, one, sum(one) - one[0])) for step, one in enumerate(tokens)]
    for verdict in verdicts[of_line:]:
        told_otherwise(verdict, first_event=around)
    (finding,) = told(verdicts)
    assert (finding.steps, finding.first_event and finding.first_event.line) == ([0, 1, 2, 3, 4], line)


def test_a_line_whose_number_has_a_name_in_some_steps_has_it_in_all() -> None:
    tokens = [(9, 5, 6, 11), (7, 12, 9, 5), (14, 3, 10, 10)]
    verdicts = [verdict_on(step, divided(step, one, 2 * sum(one))) for step, one in enumerate(tokens)]
    for verdict in verdicts[1:]:
        told_otherwise(verdict, code="GS101", name="double-averaging")
    (finding,) = told(verdicts)
    assert (finding.code, finding.steps) == ("GS101", [0, 1, 2])


def test_what_nobody_recorded_in_the_first_step_is_what_is_recorded_in_the_others() -> None:
    def twice_as_much(key: Key, tokens: Tokens) -> float:
        return 2.0 ** (3 - key[1]) / sum(tokens.values())

    trainer = Trainer(root=twice_as_much, accumulation=3)
    verdicts = [verdict_on(step, World(trainer, step).run()) for step in range(3)]
    between = FirstEvent(rank=0, seq=0, kind="backward", unrecorded=True, before={"kind": "step", "seq": 10**6})
    told_otherwise(verdicts[0], first_event=between)
    for verdict in verdicts[1:]:
        told_otherwise(verdict, code="GS102", name="repeated-reduction")
    (finding,) = told(verdicts)
    assert (finding.code, finding.steps) == ("GS102", [0, 1, 2])


def test_a_clip_in_front_of_a_division_by_a_power_of_two_tokens_is_early_as_in_other_steps() -> None:
    clip = FirstEvent(rank=0, seq=9, kind="clip", file="train.py", line=LINE)
    tokens = [(9, 5, 6, 11), (9, 6, 6, 11), (14, 3, 10, 10)]
    verdicts = [verdict_on(step, divided(step, one, 2 * sum(one))) for step, one in enumerate(tokens)]
    for verdict, code in zip(verdicts, ("GS605", "GS604", "GS605"), strict=True):
        told_otherwise(verdict, code=code, first_event=clip)
    (finding,) = told(verdicts)
    assert (finding.code, finding.steps) == ("GS605", [0, 1, 2])


def told(verdicts: list[StepVerdict]) -> list[Finding]:
    tell_one_law(verdicts)
    return merged(verdicts)


def test_a_line_that_halves_in_every_step_is_a_constant_where_losses_are_too_large_in_whole_windows_only() -> None:
    """Nobody divides by passes, so that whole windows come out as three halves of the mean, and a short one as half."""
    tokens = [(9, 5, 6, 11, 8, 3), (7, 12, 9, 4, 5, 10), (14, 3)]
    runs = [halved(step, one) for step, one in enumerate(tokens)]
    finding = the_one([verdict_on(step, run) for step, run in enumerate(runs)], runs[0])
    assert (finding.code, finding.steps) == ("GS000", [0, 1, 2])
    assert finding.first_event is not None and finding.first_event.line == LINE


def test_what_a_clip_did_that_came_too_early_is_no_constant_of_the_lines_behind_it() -> None:
    """Between it and the reduction its coefficient is measured, another one in each step, under one name."""
    tokens = [(9, 5, 6, 11, 8, 3), (7, 12, 9, 4, 5, 10)]
    runs = [halved(step, one) for step, one in enumerate(tokens)]
    verdicts = [verdict_on(step, run) for step, run in enumerate(runs)]
    for verdict, coefficient in zip(verdicts, (0.41, 0.53), strict=True):
        (change,) = verdict.changes
        early = msgspec.structs.replace(change.finding, code="GS605", name="early-clip")
        factors = {key: (coefficient, tolerance) for key, (_, tolerance) in change.factors.items()}
        verdict.changes = [replace(change, name="clip_coefficient", factor=coefficient, factors=factors)]
        verdict.findings.append(early)
    finding = the_one(verdicts, runs[0])
    assert finding.code == "GS605"
