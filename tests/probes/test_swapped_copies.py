"""Tokens that all ranks hold, and that nobody parted before they were sent to experts, count once for each rank."""

from __future__ import annotations

import pytest
import torch
from beside import judged_beside
from copy_workers import VARIANTS

from gradcheck_dist.probes.activations.exchange_layout import take
from gradcheck_dist.probes.activations.functional import parts_of


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


@pytest.mark.parametrize(("sent", "received"), [([2, 0], [0, 0]), ([0, 0], [3, 1]), (None, None)])
def test_a_rank_that_sends_or_gets_no_token_counts_its_exchanges_as_the_others_do(
    sent: list[int] | None, received: list[int] | None
) -> None:
    """Else the numbers by which exchanges of several ranks are matched would part."""
    given = torch.ones(sum(sent) if sent is not None else 4, 3)
    parts = parts_of("all-to-all", given, 2, (given, received, sent, "group"))
    assert parts is not None
    assert [length for _, _, length in parts[0]] == (sent or [2, 2])
    assert [length for _, _, length in parts[1]] == (received or [2, 2])
    values, counts = take([given], parts[0])
    assert len(values) == sum(counts) and [bool(count) for count in counts] == [bool(n) for n in sent or [2, 2]]
