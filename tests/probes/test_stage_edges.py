"""What happens to gradients between pipeline stages is seen, whoever moves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from beside import judged_beside
from stage_edge_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import StageGradient
from gradcheck_dist.ledger.transit import multiple


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "stage_edge_workers:train_all", VARIANTS)


@pytest.mark.parametrize(
    "variant",
    [
        "by hand",
        "by hand, let go",
        "by hand, by its edge",
        "by hand, rounded on the way",
        "by hand, one buffer",
        "by hand, a skip beside",
        "by hand, backward behind all forwards",
        "schedule",
    ],
)
def test_gradients_that_pass_unchanged_or_rounded_are_clean(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert report.verdict == "clean"
    assert {"GS202", "GS203", "GS204"} <= set(report.rules.passed)
    assert not [note for note in report.coverage.problems + report.coverage.notes if "on the way" in note]


@pytest.mark.parametrize(
    ("variant", "factor", "line"),
    [
        ("by hand, halved before it is sent", 0.5, "loss_of("),
        ("by hand, let go, halved before it is sent", 0.5, "loss_of("),
        ("by hand, by its edge, halved before it is sent", 0.5, "loss_of("),
        ("by hand, a skip beside, halved before it is sent", 0.5, "loss_of("),
        ("schedule, hook", 3.0, "schedule.step"),
    ],
)
def test_a_factor_on_the_way_is_told_with_both_its_ends(
    reports: dict[str, Report], variant: str, factor: float, line: str
) -> None:
    (finding,) = reports[variant].findings
    assert finding.code == "GS202"
    assert finding.factor.observed == pytest.approx(factor, rel=1e-6)
    assert set(finding.ranks) == {0}
    event = finding.first_event
    assert event is not None and event.unrecorded and event.rank == 1
    assert event.before is not None and event.before["kind"] == "backward"
    source = Path(str(event.file)).read_text().splitlines()
    assert line in source[(event.line or 0) - 1]


def test_gradients_of_earlier_microbatches_that_are_handed_over_again_are_told(reports: dict[str, Report]) -> None:
    (finding,) = reports["by hand, one buffer never emptied"].findings
    assert (finding.code, finding.ranks, finding.num_parameters) == ("GS203", [0], 3)
    assert finding.pattern == "2 microbatches with the gradients of earlier ones"
    assert "1 x that of accumulation step 0 + 1 x that of accumulation step 1" in finding.explanation
    event = finding.first_event
    assert event is not None and event.rank == 1
    assert "loss_of(" in Path(str(event.file)).read_text().splitlines()[(event.line or 0) - 1]


@pytest.mark.parametrize(
    ("variant", "num"),
    [("signs only", 3), ("the first one again", 1), ("a skip beside, halved on one edge", 3)],
)
def test_gradients_that_are_none_of_those_that_were_sent_leave_the_verdict_open(
    reports: dict[str, Report], variant: str, num: int
) -> None:
    report = reports[f"by hand, {variant}"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = (one for one in report.reasons if "none of those which left these" in one)
    assert reason.count("(accumulation step") == num and "on rank 0, backward begins with gradients" in reason


@pytest.mark.parametrize(
    ("variant", "num", "whose"),
    [
        ("a skip beside, exchanged", 3, "another tensor of the same pass"),
        # The one in the middle is right.
        ("backward behind all forwards, in another order", 2, "its pass (accumulation step 0, microbatch 0)"),
    ],
)
def test_gradients_of_other_activations_are_found(
    reports: dict[str, Report], variant: str, num: int, whose: str
) -> None:
    """Each gradient that was sent is differentiated once: what was sent forward tells that it is another's."""
    (finding,) = reports[f"by hand, {variant}"].findings
    assert (finding.code, finding.ranks, finding.severity) == ("GS204", [0], "error")
    assert f"{num} passes with" in finding.pattern and f"gets the gradient of {whose}" in finding.explanation
    event = finding.first_event
    assert event is not None and event.rank == 0
    assert ("was given in its pass (accumulation step 2, microbatch 0)" in finding.explanation) == ("its pass" in whose)
    assert "backward(" in Path(str(event.file)).read_text().splitlines()[(event.line or 0) - 1]


def test_outputs_without_the_gradient_that_was_sent_leave_the_verdict_open(reports: dict[str, Report]) -> None:
    report = reports["by hand, a skip beside, emptied"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = (one for one in report.reasons if "no gradient but zero" in one)
    assert reason.count("(accumulation step") == 3 and "order" in report.next_step


def test_a_gradient_that_nobody_differentiates_leaves_the_verdict_open(reports: dict[str, Report]) -> None:
    report = reports["by hand, a skip beside, lost"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert "on rank 1, gradients are sent for several activations" in reason
    assert "requires_grad" in report.next_step


def edge(values: np.ndarray) -> StageGradient:
    return StageGradient(
        seq=1, t_ns=0, step=0, accumulation_step=0, microbatch=0, side="input", shape=(64,), dtype="float32",
        values=values.astype("<f4").tobytes(),
    )  # fmt: skip


def test_only_a_multiple_is_a_multiple() -> None:
    left = np.random.default_rng(0).normal(size=64)
    assert multiple(edge(-0.25 * left), edge(left)) == pytest.approx((-0.25, 0), abs=1e-6)
    assert multiple(edge(left + 0.1), edge(left)) is None
    rounded = multiple(edge(left * (1 + 0.004 * np.sign(left[::-1]))), edge(left))
    assert rounded is not None
    assert abs(rounded[0] - 1) < 6 * rounded[1] < 0.01
    assert multiple(edge(np.zeros(64)), edge(left)) is None
    few = np.where(np.arange(64) < 7, left, 0.0)
    assert multiple(edge(few), edge(few)) is None, "seven elements prove nothing"
    assert multiple(edge(np.full(64, np.inf)), edge(left)) is None


@pytest.mark.parametrize("how", ["by hand", "schedule"])
def test_labels_of_another_microbatch_leave_the_verdict_open(reports: dict[str, Report], how: str) -> None:
    """The first stage reads the tokens and the last one has the labels: what was sent tells which belong together."""
    assert reports[f"{how}, labels"].verdict == "clean"
    report = reports[f"{how}, labels of the next microbatch"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert "on rank 1 has labels that are hardly found among its tokens (rank 0, pass" in reason
    assert "and so have 2 more" in reason
