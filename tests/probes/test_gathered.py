"""Parameters whose parts functions of the trainer's own gather in forward and reduce in backward (ZeRO 3 by hand): what
arrives at them is a sum over ranks already, and no rank's own contribution."""

from __future__ import annotations

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

EXPECTED = {
    "right": ("clean", []),
    "padded": ("clean", []),
    "averaged": ("clean", []),
    "columns": ("clean", []),
    "flat": ("clean", []),
    "bfloat16": ("clean", []),
    "torch's own": ("clean", []),
    "handed on": ("clean", []),
    "reduced over itself": ("clean", []),
    "averaged twice": ("findings", [("GS101", "1/world_size")]),
    "halved": ("findings", [("GS101", "1/accumulation_steps")]),
    "flat, halved": ("findings", [("GS101", "1/accumulation_steps")]),
    "columns, halved": ("findings", [("GS101", "1/accumulation_steps")]),
    "wide columns, averaged": ("clean", []),
    "wide columns, halved": ("findings", [("GS101", "1/accumulation_steps")]),
    "turned": ("undetermined", []),
    "activations": ("clean", []),
    "strided activations": ("clean", []),
    "input": ("clean", []),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("gathered")
    results = launch("gathered_workers:run", (list(EXPECTED), str(folder)), 3, timeout_s=90)
    for of_rank in results:
        assert all(bare == recorded for bare, recorded in of_rank)
    return {variant: diagnose(read_run(folder / variant)) for variant in EXPECTED}


@pytest.mark.parametrize("variant", EXPECTED)
def test_parameters_that_a_function_gathers_are_judged_by_what_its_backward_is_given(
    reports: dict[str, Report], variant: str
) -> None:
    report = reports[variant]
    found = [(finding.code, finding.factor.expression) for finding in report.findings]
    assert (report.verdict, found) == EXPECTED[variant], report.reasons
    assert report.coverage.parameters_observed >= 2


def test_an_average_in_backward_is_laid_to_the_function(reports: dict[str, Report]) -> None:
    (finding,) = reports["averaged twice"].findings
    assert "the backward of Gather then averages over 3 ranks" in finding.explanation
    assert finding.first_event is not None and finding.first_event.file is not None
    assert finding.first_event.file.endswith("gathered_workers.py")


@pytest.mark.parametrize("variant", ["columns, halved", "wide columns, halved"])
def test_what_is_recorded_for_some_parameters_and_measured_for_others_is_one_line_s_doing(
    reports: dict[str, Report], variant: str
) -> None:
    (finding,) = reports[variant].findings
    assert finding.num_parameters == reports[variant].coverage.parameters_total == 4
    assert finding.first_event is not None and finding.first_event.kind == "reduce"
    assert "the backward of Gather then divides its sum by 2" in finding.explanation


def test_a_function_that_is_not_followed_is_named(reports: dict[str, Report]) -> None:
    assert any("Turned combines parameters of several ranks in an order" in one for one in reports["turned"].reasons)
