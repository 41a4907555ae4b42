"""Gradients that are reduced in every pass and kept elsewhere until the optimizer: emptied, and nothing was lost."""

from __future__ import annotations

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

EXPECTED = {
    "right": ("clean", []),
    "clipped": ("clean", []),
    "clipped each": ("undetermined", []),
    "halved": ("findings", [("GS000", 0.5)]),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("kept")
    launch("kept_workers:run", (list(EXPECTED), str(folder)), 2, timeout_s=90)
    return {variant: diagnose(read_run(folder / variant)) for variant in EXPECTED}


@pytest.mark.parametrize("variant", EXPECTED)
def test_what_rounding_leaves_in_an_emptied_buffer_is_no_weight(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    found = [(finding.code, round(finding.factor.observed or 0, 4)) for finding in report.findings]
    assert (report.verdict, found) == EXPECTED[variant]
