"""Random trainers of which the truth is known: none that is right is accused, none that is wrong is missed.

`benchmarks/bench_detection.py` prints the same by family, over thousands.
"""

from __future__ import annotations

import pytest
from held_back import hold_back
from random_trainers import Culprit, Outcome, culprit_of, judge
from simulator import LINES, World
from trainer_families import FAMILIES, make_case

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.events import (
    AmpUnscale,
    Backward,
    Clip,
    Event,
    Loss,
    LossGradient,
    PipelineStep,
    Reduce,
    ScaleGrads,
    ZeroGrad,
)

RIGHT = ("healthy-trainers", "reduced-by-hand", "clip-by-hand")
SMOKE = 5
MANY = 60


def told(outcome: Outcome) -> str:
    found = [(finding.code, culprit_of(finding), finding.pattern) for finding in outcome.report.findings]
    return f"{outcome.case.family} {outcome.case.seed}: {outcome.report.verdict} {found}"


def check(name: str, seeds: range, needed: float) -> None:
    outcomes = [judge(make_case(name, seed)) for seed in seeds]
    assert [told(outcome) for outcome in outcomes if outcome.accused and not outcome.case.faults] == []
    assert [told(outcome) for outcome in outcomes if outcome.missed] == []
    wrong = [told(outcome) for outcome in outcomes if not outcome.right]
    assert len(wrong) <= (1 - needed) * len(outcomes), wrong


@pytest.mark.parametrize("name", FAMILIES)
def test_a_few_of_every_family_are_judged_rightly(name: str) -> None:
    check(name, range(SMOKE), 1.0)


NAMED_WRONGLY = [
    ("tokens-of-an-accumulation-step", 91004),
    ("tokens-of-a-group", 91020),
    ("averaging-and-a-hand", 91006),
    ("normalised-by-a-wrong-number", 96010),
    ("gradient-of-the-step-before", 99012),
    ("wrong-constant", 300035),
    ("wrong-constant", 300183),
    ("tokens-of-the-next-rank", 300196),
    ("double-averaging", 1200016),
    ("rescaling-and-averaging", 1200018),
    ("hand-on-some-parameters", 3200008),
    ("clip-by-hand", 1500003),
    ("every-loss-by-a-number-of-its-own", 12340009),
    ("every-loss-by-a-number-of-its-own", 8801),
    ("repeated-reduction", 921002),  # sums in bfloat16 swallowed a contribution
]


@pytest.mark.parametrize(("name", "seed"), NAMED_WRONGLY)
def test_what_was_named_wrongly_once_is_named_rightly(name: str, seed: int) -> None:
    check(name, range(seed, seed + 1), 1.0)


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_many_of_every_family_are_judged_rightly(name: str) -> None:
    check(name, range(1000, 1000 + MANY), 0.97)


@pytest.mark.long
@pytest.mark.parametrize("kind", [AmpUnscale, Backward, Clip, Loss, LossGradient, PipelineStep, ScaleGrads, ZeroGrad])
def test_a_right_trainer_is_not_accused_when_one_probe_is_missing(kind: type[Event]) -> None:
    for seed in range(4):
        for name in RIGHT:
            case = make_case(name, seed)
            report = diagnose(hold_back(World(case.trainer, seed).run(), kind))
            assert [finding.code for finding in report.findings if finding.severity == "error"] == []


@pytest.mark.parametrize("seed", range(6))
def test_a_reduction_that_was_not_recorded_leaves_a_bracket_and_not_the_name_of_a_reduction(seed: int) -> None:
    case = make_case("double-averaging", seed)
    findings = diagnose(hold_back(World(case.trainer, seed).run(), Reduce)).findings
    # Told as an average where the factor is no power of the accumulation steps as well.
    assert {finding.code for finding in findings} in ({"GS000"}, {"GS101"})
    assert all(culprit_of(finding).unrecorded for finding in findings)
    assert findings[0].factor.observed == pytest.approx(1 / case.trainer.data_ranks, rel=0.02)


def test_the_opposite_of_the_mean_of_means_is_not_called_that() -> None:
    """bfloat16, 83 and 84 tokens: within the tolerance of both, and each rank's loss is divided by the other's."""
    case = make_case("tokens-of-the-next-rank", 424206)
    (finding,) = diagnose(World(case.trainer, 424206).run()).findings
    assert (finding.code, culprit_of(finding).kind) == ("GS000", "loss")


@pytest.mark.parametrize("seed", [130000, 130028, 130033])
def test_a_factor_by_parameter_beside_an_unrecorded_average_accuses_no_loss(seed: int) -> None:
    case = make_case("by-the-size-of-a-parameter", seed)
    (finding,) = diagnose(hold_back(World(case.trainer, seed).run(), Reduce)).findings
    assert (finding.code, culprit_of(finding)) == ("GS000", Culprit("backward", True, "optimizer_step"))


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_whose_scaling_was_not_recorded_leaves_a_bracket(seed: int) -> None:
    case = make_case("rescaled-accumulation", seed)
    findings = diagnose(hold_back(World(case.trainer, seed).run(), ScaleGrads)).findings
    assert {finding.code for finding in findings} == {"GS000"}
    assert all(culprit_of(finding).unrecorded for finding in findings)


@pytest.mark.parametrize("seed", range(6))
def test_a_zero_grad_that_was_not_recorded_has_its_name_and_a_bracket(seed: int) -> None:
    case = make_case("zeroed-accumulation", seed)
    findings = diagnose(hold_back(World(case.trainer, seed).run(), ZeroGrad)).findings
    assert {finding.code for finding in findings} == {"GS401"}
    for finding in findings:
        assert culprit_of(finding) in {Culprit("backward", True, "backward"), Culprit("backward", True, "reduce")}


Lines = tuple[int, int]
END = 99


def lines_of(finding: Finding) -> Lines:
    """The lines of the simulated script between which a finding says it happened; zero_grad runs between passes."""
    event = finding.first_event
    assert event is not None
    if event.kind == "zero_grad":
        return (LINES["backward"], END)
    if not event.unrecorded:
        return (event.line or 0, event.line or END)
    return (event.line or 0, event.before["line"] if event.before else END)


SAID_OF_LOSSES = {"sum-of-means"}
"""What a sum of means over ranks is called where losses were not recorded, and so no mean was seen: a normaliser."""


def wrong_names(name: str, seed: int, kind: type[Event]) -> list[str]:
    """Findings of a trainer without one probe that name a rule or a recorded event that is not the fault's, or a
    bracket in which the fault is not."""
    case = make_case(name, seed)
    world = World(case.trainer, seed)
    run = world.run()
    faults = [] if world.is_right() else case.faults
    recorded = {culprit.kind for fault in faults for culprit in fault.culprits if not culprit.unrecorded}
    codes = {"GS000", "GS501", *(code for fault in faults for code in fault.codes)}
    if name in SAID_OF_LOSSES and kind is Loss:
        codes, recorded = codes | {"GS303"}, recorded | {"loss"}
    places = [lines_of(f) for f in diagnose(run).findings if any(culprit_of(f) in fault.culprits for fault in faults)]
    wrong = []
    for finding in diagnose(hold_back(World(case.trainer, seed).run(), kind)).findings:
        culprit, (first, last) = culprit_of(finding), lines_of(finding)
        inside = culprit.unrecorded and any(first <= end and start <= last for start, end in places)
        if finding.code not in codes or not (inside or culprit.kind in recorded or finding.severity == "warning"):
            wrong.append(f"{name} {seed}: {finding.code} {culprit} {finding.pattern}")
    return wrong


ONCE_WRONG: list[tuple[str, int, type[Event]]] = [
    ("zeroed-accumulation", 0, Loss),
    ("wrong-constant", 1, AmpUnscale),
    ("not-unscaled", 0, Reduce),
    ("hand-on-some-parameters", 5, Reduce),
    ("reduction-with-another-factor", 6, Reduce),
    ("rescaling-and-averaging", 5, ScaleGrads),
    ("last-microbatch-scaled", 3, AmpUnscale),
    ("rescaling-and-averaging", 82004, Clip),
    ("clip-by-hand", 96010, Reduce),
    ("some-losses-scaled-and-averaged", 96012, Loss),
    ("never-reduced", 0, Clip),
    ("never-reduced", 8, Clip),
    ("repeated-reduction", 5, Loss),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "seed", "kind"), ONCE_WRONG)
def test_without_a_probe_the_bracket_holds_the_fault(name: str, seed: int, kind: type[Event]) -> None:
    assert wrong_names(name, seed, kind) == []


HAND_FAMILIES = ("hand-behind-backward", "one-rank-scaled", "reduced-again-by-hand", "reduction-with-another-factor")


@pytest.mark.parametrize("name", HAND_FAMILIES)
def test_without_the_probe_of_reductions_no_wrong_name_is_given(name: str) -> None:
    assert [wrong for seed in range(4) for wrong in wrong_names(name, seed, Reduce)] == []


STILL_WRONG: list[tuple[str, int, type[Event]]] = [
    ("wrong-constant", 8, Clip),  # the average is accused beside the clip: the loss is 22 times too large
    ("reduced-in-bfloat16", 9, Clip),  # the clip's factor is 1/32 within 1e-3
    ("not-unscaled", 6, Reduce),  # the bracket does not reach to the loss: the average is 1/4 within 8e-3
]


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", [AmpUnscale, Clip, Loss, PipelineStep, Reduce, ScaleGrads, ZeroGrad])
def test_holding_back_a_probe_gives_a_bracket_and_no_wrong_name(name: str, kind: type[Event]) -> None:
    seeds = [seed for seed in range(10) if (name, seed, kind) not in STILL_WRONG]
    assert [wrong for seed in seeds for wrong in wrong_names(name, seed, kind)] == []


@pytest.mark.simulation
@pytest.mark.parametrize(("name", "seed", "kind"), STILL_WRONG)
@pytest.mark.xfail(strict=True, reason="a clip or an average that is hidden, known to bfloat16's few digits")
def test_what_is_hidden_in_bfloat16_has_no_wrong_name(name: str, seed: int, kind: type[Event]) -> None:
    assert wrong_names(name, seed, kind) == []


@pytest.mark.parametrize("kind", [Backward, LossGradient])
def test_without_losses_or_passes_nothing_is_judged(kind: type[Event]) -> None:
    case = make_case("double-averaging", 0)
    assert diagnose(hold_back(World(case.trainer).run(), kind)).verdict == "undetermined"
