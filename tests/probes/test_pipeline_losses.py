"""Losses that count no tokens behind torch's pipelines, whose last stage gives backward no gradient, or one of ones."""

from __future__ import annotations

import pytest
from beside import judged_beside
from pipeline_loss_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "pipeline_loss_workers:train_all", VARIANTS)


@pytest.mark.parametrize(
    "variant",
    [
        *("divided by the schedule", "divided in the loss", "accumulated"),
        *("all forwards first", "zero bubble", "zero bubble in a V"),
    ],
)
def test_means_that_are_divided_once_are_clean(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.findings, report.coverage.problems) == ("clean", [], [])
    assert report.run.axes["pp"] == 2


@pytest.mark.parametrize(
    ("variant", "code", "factor"),
    [
        ("divided by nobody", "GS303", "microbatches"),
        ("all forwards first, divided by nobody", "GS303", "microbatches"),
        ("zero bubble, divided by nobody", "GS303", "microbatches"),
        ("halved on the first stage", "GS000", "1/pp"),
        ("accumulated, divided by the schedule", "GS201", "microbatches^-(K-1-k)"),
        ("accumulated, undivided", "GS303", "accumulation_steps"),
    ],
)
def test_what_is_wrong_with_them_is_found(reports: dict[str, Report], variant: str, code: str, factor: str) -> None:
    (finding,) = reports[variant].findings
    assert (finding.code, finding.factor.expression) == (code, factor)
    assert code != "GS303" or "by the number of microbatches, and of accumulation steps" in finding.fix
    assert set(finding.ranks) == ({0} if "halved" in variant else {0, 1})
