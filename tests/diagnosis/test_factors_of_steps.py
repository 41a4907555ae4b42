"""One cause has another factor in another step: a count that is wrong there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.finding import Factor, Finding, FirstEvent
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause, merged

RUN = World(Trainer(root=global_mean(), op="sum")).run()


def off_by(step: int, factor: float, name: str = "", **quantities: float) -> StepVerdict:
    verdict = judge_step(RUN, 0, "global-token-mean", "given")
    finding = Finding(
        code="GS000", name="", severity="error", step=step, factor=Factor(observed=factor), units=[], num_parameters=1,
        pattern=f"every contribution x {factor:g}", ranks=[0, 1], first_event=None, explanation="Off.", fix="",
        steps=[step],
    )  # fmt: skip
    context = replace(verdict.context, step=step, quantities=quantities)
    made_of = {cause(finding): ((name, 1),)} if name else {}
    return replace(verdict, context=context, findings=[finding], effects={}, made_of=made_of)


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ((2.0, 2.0, 2.0), "Off."),
        ((2.0, 1.5, 3.0), "Off. The factor is that of step 0: it is x 1.5 in step 1, x 3 in step 2."),
        ((2.0, 1.5, 2.0, 1.5), "Off. The factor is that of step 0: it is x 1.5 in steps 1 and 3."),
    ],
)
def test_the_finding_tells_which_factor_is_which_steps(factors: tuple[float, ...], told: str) -> None:
    verdicts = [off_by(step, factor) for step, factor in enumerate(factors)]
    for _ in range(2):  # screens join findings again as steps come
        (finding,) = merged(verdicts)
        assert (finding.steps, finding.explanation) == (list(range(len(factors))), told)


@pytest.mark.parametrize(
    ("names", "step"),
    [
        (("ranks", "", ""), 1),  # 2 ranks would make it 2 in all steps
        (("ranks", "passes", "passes"), 1),
        (("passes", "ranks", ""), 0),
        (("unknown", "", ""), 0),  # what other steps do not tell of, they do not contradict
    ],
)
def test_a_name_that_other_steps_contradict_is_not_told(names: tuple[str, ...], step: int) -> None:
    verdicts = [off_by(at, at + 2.0, name, ranks=2.0, passes=at + 2.0) for at, name in enumerate(names)]
    for _ in range(2):
        (finding,) = merged(verdicts)
        assert (finding.step, finding.steps) == (step, [0, 1, 2])
        assert f"The factor is that of step {step}:" in finding.explanation


def test_one_line_that_reduces_over_groups_of_two_sizes_has_a_factor_for_each() -> None:
    """As below FSDP2, where experts are averaged over fewer ranks than the rest in one backward pass."""
    of_few, of_all = (off_by(0, factor) for factor in (0.5, 0.25))
    for verdict, group in ((of_few, [0, 2]), (of_all, [0, 1, 2, 3])):
        verdict.findings[0].first_event = FirstEvent(
            rank=0, seq=7, kind="reduce", op="avg", group=group, file="train.py", line=8
        )
    found = merged([replace(of_few, findings=[*of_few.findings, *of_all.findings])])
    assert [one.factor.observed for one in found] == [0.5, 0.25]
    assert all(one.explanation == "Off." for one in found)
