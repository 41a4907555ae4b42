"""A rank's part of a sequence may have no labels: zeros that it adds to a sum are nobody's, nor is a buffer of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


@pytest.mark.parametrize(("summed", "codes"), [("both", []), ("first", ["GS703"])])
def test_a_summand_of_zeros_may_be_in_a_sum_or_not(tmp_path: Path, summed: str, codes: list[str]) -> None:
    launch("empty_part_workers:train", (summed, str(tmp_path / "run")), 3, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == codes
    assert all(finding.num_parameters == 2 for finding in report.findings)


@pytest.mark.parametrize(("summed", "codes"), [("both", []), ("first", ["GS703"])])
def test_ranks_that_part_the_sequence_alone_have_one_batch(tmp_path: Path, summed: str, codes: list[str]) -> None:
    """They hold copies, with gradients that differ and are summed but for those that see the whole sequence."""
    launch("empty_part_workers:train", (summed, str(tmp_path / "run"), False), 3, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == codes
    assert {weight.contribution.data_rank for weight in report.weights} == {0}
