"""What is wrong at one place in several steps has one law: what coincides in one step is not told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from random_trainers import global_mean, rank_mean
from simulator import Trainer, World, param_table

from gradcheck_dist.diagnosis.engine import conclude
from gradcheck_dist.diagnosis.finding import Factor, Finding, FirstEvent
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.one_law import tell_one_law
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause, merged
from gradcheck_dist.diagnosis.words import BY_HAND
from gradcheck_dist.ledger.contributions import ContributionKey as Key


def judged(step: int, trainer: Trainer, tokens: Sequence[int]) -> StepVerdict:
    """The verdict on a step whose contributions hold so many tokens each."""
    world = World(trainer, seed=step)
    world.num_tokens = dict(zip(trainer.keys, tokens, strict=True))
    world.token_gradients = {(0, name): world._gradients(name, size) for name, size in param_table(trainer)}
    verdict = judge_step(world.run(), 0, "global-token-mean", "given")
    verdict.context = replace(verdict.context, step=step)
    for finding in verdict.findings:
        finding.step, finding.steps = step, [step]
    return verdict


def told(verdicts: list[StepVerdict]) -> list[Finding]:
    tell_one_law(verdicts)
    return merged(verdicts)


def test_a_count_of_each_rank_is_told_where_ranks_hold_as_many_tokens_in_a_step() -> None:
    trainer = Trainer(root=rank_mean(4.0), accumulation=2)
    equal, unequal = judged(0, trainer, (9, 5, 6, 8)), judged(1, trainer, (5, 12, 9, 11))
    assert [one.code for one in equal.findings] == ["GS303"]
    run = World(trainer, seed=0).run()
    (finding,) = conclude(run, [equal, unequal], [], "global-token-mean", "given").findings
    assert (finding.code, finding.steps) == ("GS302", [0, 1])


def test_a_pass_that_is_off_alone_is_told_once_where_a_window_ends_behind_it() -> None:
    """Half of the mean is what an average over two ranks too many makes of it, where there is one pass."""

    def first_halved(key: Key, tokens: dict[Key, int]) -> float:
        return 2.0 * (1 if key[1] else 0.5) / sum(tokens.values())

    whole = judged(0, Trainer(root=first_halved, accumulation=2), (9, 5, 6, 8))
    short = judged(1, Trainer(root=first_halved, accumulation=1), (9, 5))
    assert [one.code for one in (*whole.findings, *short.findings)] == ["GS000", "GS101"]
    (finding,) = told([whole, short])
    assert (finding.code, finding.steps) == ("GS000", [0, 1])


def test_two_findings_of_a_step_are_one_whose_law_other_steps_tell() -> None:
    """With 48 tokens in six passes on two ranks, 1/n_c is 48/(6 n_c) times 1/2 three times over."""

    def twice(key: Key, tokens: dict[Key, int]) -> float:
        return 2.0 / (tokens[key] * sum(tokens.values()))

    trainer = Trainer(root=twice, accumulation=3)
    plain, odd = judged(0, trainer, (10, 15, 11, 9, 15, 8)), judged(1, trainer, (4, 14, 6, 5, 7, 12))
    assert len(odd.findings) == 2
    (finding,) = told([plain, odd])
    assert (finding.code, finding.factor.expression, finding.steps) == ("GS303", "n_c^-1", [0, 1])


def test_a_factor_on_some_weights_is_not_a_count_in_the_step_where_one_is_as_large() -> None:
    def first_larger(key: Key, tokens: dict[Key, int]) -> float:
        return (2.0 if key[1] else 4.8) / sum(tokens.values())

    trainer = Trainer(root=first_larger, accumulation=3)
    plain, odd = judged(0, trainer, (10, 15, 11, 9, 8, 6)), judged(1, trainer, (10, 7, 5, 10, 8, 8))
    assert [one.code for one in odd.findings] == ["GS305"]
    (finding,) = told([plain, odd])
    assert (finding.code != "GS305", finding.steps) == (True, [0, 1])


@pytest.mark.parametrize(("part", "place"), [(0, "data rank 1"), (1, "the last accumulation step (2)")])
def test_a_degree_on_some_weights_is_no_count_where_all_passes_hold_as_many_tokens(part: int, place: str) -> None:
    """N tokens in place of those of one rank, or of one pass of each, are twice and three times as many."""
    number = 3 if part else 2

    def larger(key: Key, tokens: dict[Key, int]) -> float:
        return 2.0 * (number if key[part] == number - 1 else 1) / sum(tokens.values())

    (finding,) = judged(0, Trainer(root=larger, accumulation=3), [8] * 6).findings
    assert (finding.code, finding.pattern) == ("GS000", f"x {number} on {place}, the rest right")


def test_a_number_that_is_another_in_each_step_is_no_degree() -> None:
    steps = [judged(step, Trainer(root=global_mean(2 * off)), (9, 11)) for step, off in enumerate((8 / 9, 0.5, 0.7))]
    assert [one.code for one in steps[1].findings] == ["GS101"]
    (finding,) = told(steps)
    assert (finding.code, finding.factor.expression, finding.steps) == ("GS303", None, [0, 1, 2])


def test_where_other_steps_are_open_such_a_number_loses_its_name() -> None:
    steps = [judged(step, Trainer(root=global_mean(2 * off)), (9, 11)) for step, off in enumerate((8 / 9, 0.5, 0.7))]
    steps[0].findings, steps[2].findings = [], []
    (finding,) = told(steps)
    assert (finding.code, finding.factor.expression, finding.steps) == ("GS000", None, [1])
    assert "in this step alone" in finding.explanation


def test_a_degree_that_is_there_in_two_steps_keeps_its_name() -> None:
    steps = [judged(step, Trainer(root=global_mean(2 * off)), (9, 11)) for step, off in enumerate((8 / 9, 0.5, 0.5))]
    assert {one.code for one in told(steps)} == {"GS101", "GS303"}


def test_a_degree_keeps_its_name_beside_what_changes_from_step_to_step() -> None:
    steps = [judged(step, Trainer(root=global_mean(1.0)), (9, 11)) for step in range(3)]
    for verdict, losses in zip(steps, (9.0, 11.25, 9.25), strict=True):
        assert verdict.conduct is not None
        verdict.conduct = replace(verdict.conduct, losses=losses)
    assert [(one.code, one.steps) for one in told(steps)] == [("GS101", [0, 1, 2])]


def test_a_missing_average_goes_over_ranks_without_tokens_as_well() -> None:
    """Of four ranks one has nothing: what an average would have left is 1/4 all the same."""
    trainer = Trainer(root=global_mean(4), data_ranks=4, sync="never")
    (finding,) = judged(0, trainer, (9, 0, 7, 12)).findings
    assert (finding.code, round(finding.factor.observed or 0.0, 4)) == ("GS103", 4.0)


def test_a_number_of_passes_is_told_by_the_step_that_has_another_number_of_them() -> None:
    """Means that are divided by their passes twice; of two passes that is 1/2, as an average over two ranks."""
    steps = [
        judged(step, Trainer(root=global_mean(2 / passes), accumulation=passes), tokens)
        for step, (passes, tokens) in enumerate(
            ((3, (9, 11, 8, 7, 12, 5)), (3, (6, 9, 5, 8, 11, 7)), (2, (8, 9, 7, 5)))
        )
    ]
    assert [one.code for one in steps[2].findings] == ["GS101"]
    (finding,) = told(steps)
    assert (finding.code, finding.factor.expression, finding.steps) == ("GS303", "1/accumulation_steps", [0, 1, 2])


def test_a_step_that_comes_out_right_contradicts_such_a_number() -> None:
    steps = [
        judged(step, Trainer(root=global_mean(2 * off), accumulation=passes), tokens)
        for step, (passes, off, tokens) in enumerate(
            ((3, 1 / 3, (9, 11, 8, 7, 12, 5)), (2, 1 / 2, (8, 9, 7, 5)), (4, 1, (8, 9, 7, 5, 4, 6, 11, 3)))
        )
    ]
    assert len(told(steps)) == 2


def test_a_number_that_coincides_with_a_degree_in_one_step_is_told_by_the_others() -> None:
    """Half of the tokens in one step, and other shares in others, of those of all losses that were evaluated."""
    steps = [judged(step, Trainer(root=global_mean(2 * off)), (9, 11)) for step, off in enumerate((0.4, 0.5, 0.625))]
    for one, evaluated in zip(steps, (50, 40, 32), strict=True):
        key = cause(one.findings[0])
        one.context.quantities["evaluated_tokens"] = evaluated
        if evaluated != 40:
            one.made_of[key] = (("evaluated_tokens", -1), ("num_tokens", 1))
            one.findings[0].factor.expression = "num_tokens/evaluated_tokens"
    (finding,) = told(steps)
    assert (finding.factor.expression, finding.steps) == ("num_tokens/evaluated_tokens", [0, 1, 2])


@pytest.mark.parametrize("passes", [(3, 3, 2), (2, 3, 3), (3, 2, 2)])
def test_a_degree_that_every_step_is_off_by_is_told_once_where_one_has_as_many_passes(passes: Sequence[int]) -> None:
    """A line divides by two ranks too often; in a window of two, what divides by passes looks the same."""
    steps = []
    for step, num in enumerate(passes):
        steps.append(judged(step, Trainer(root=global_mean(1), accumulation=num), [9, 11, 8, 7, 12, 5][: 2 * num]))
        (finding,) = steps[step].findings
        if num == 2:
            event = msgspec.structs.replace(finding.first_event, line=(finding.first_event.line or 0) - 1)
            factor = msgspec.structs.replace(finding.factor, expression="1/accumulation_steps")
            told_so = msgspec.structs.replace(finding, code="GS000", first_event=event, factor=factor)
            steps[step].findings = [told_so]
            steps[step].shapes[cause(told_so)] = steps[step].shapes[cause(finding)]
            steps[step].made_of[cause(told_so)] = (("accumulation_steps", -1),)
    (finding,) = told(steps)
    assert (finding.code, finding.factor.expression, finding.steps) == ("GS101", "1/dp_replicate", [0, 1, 2])


@pytest.mark.parametrize(("pattern", "num"), [(f"{BY_HAND}: 0.63", 1), ("x 0.5 everywhere", 2)])
def test_a_clip_by_hand_is_one_finding_whatever_came_last_before_it(pattern: str, num: int) -> None:
    """Which gradient is measured best differs from step to step, and with it the last event before the clip."""

    def verdict(step: int, kind: str, line: int) -> SimpleNamespace:
        event = FirstEvent(rank=0, seq=7, kind=kind, file="train.py", line=line)
        finding = Finding(code="GS601", name="local-clip-norm", severity="error", step=step, steps=[step],
                          factor=Factor(observed=0.63), pattern=pattern, units=[], num_parameters=2, ranks=[0, 1],
                          first_event=event, explanation="", fix="")  # fmt: skip
        return SimpleNamespace(findings=[finding], effects={})

    found = merged([verdict(0, "grad_write", 88), verdict(1, "reduce", 81)])  # type: ignore[list-item]
    assert len(found) == num
    assert found[0].steps == ([0, 1] if num == 1 else [0])
