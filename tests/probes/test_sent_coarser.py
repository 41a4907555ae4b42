"""Gradients that ranks send in a coarser type and add up themselves: in the sum each part's rounding is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from coarse_workers import VARIANTS

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch

EXPECTED = {"right": "clean", "right, swapped": "clean", "half": "findings"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_parts_that_were_rounded_are_known_and_what_else_is_done_to_them_is_not(
    dtype: str, tmp_path: Path
) -> None:
    launch("coarse_workers:run", (dtype, str(tmp_path)), 2, timeout_s=90)
    reports = {variant: diagnose(read_run(tmp_path / variant)) for variant in VARIANTS}
    verdicts = {variant: report.verdict for variant, report in reports.items()}
    assert verdicts == {variant: EXPECTED.get(variant, "undetermined") for variant in VARIANTS}
    (finding,) = reports["half"].findings
    assert finding.factor.observed == pytest.approx(0.5, rel=5e-3)
    assert finding.num_parameters == reports["half"].coverage.parameters_total
