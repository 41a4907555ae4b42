"""Tokens that all ranks hold, and that nobody parted before they were sent to experts, count once for each rank."""

from __future__ import annotations

import pytest
from beside import judged_beside
from copy_workers import VARIANTS


def test_tokens_of_one_batch_that_all_ranks_send_leave_the_verdict_open(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    reports = judged_beside(tmp_path_factory, "copy_workers:train_all", VARIANTS)
    assert {name: (report.verdict, report.findings) for name, report in reports.items()} == {
        "parted": ("clean", []),
        "whole": ("undetermined", []),
        "whole, divided": ("undetermined", []),
        "functional, parted": ("clean", []),
        "functional, whole": ("undetermined", []),
    }
    [whole], [divided] = reports["whole"].reasons, reports["whole, divided"].reasons
    assert "exchanges what all 2 ranks hold alike" in whole and "2 times: x 2, unless" in whole
    [functional] = reports["functional, whole"].reasons
    assert functional.startswith("all_to_all_single (") and "2 times: x 2, unless" in functional
    assert "x 0.5 makes up for that" in divided
