"""A gradient that backward makes whole on each of several ranks with parts of their own counts once, or for each."""

from __future__ import annotations

import pytest
from beside import judged_beside
from whole_gradient_workers import UNREDUCED, VARIANTS


def test_a_gradient_that_is_whole_on_each_rank_is_left_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Averaged it is right where backward gathered a sum, and summed where that was divided: of neither is more known
    than that the ranks' gradients are the same, and none is accused."""
    reports = judged_beside(tmp_path_factory, "whole_gradient_workers:train_all", VARIANTS)
    assert {name: (report.verdict, report.findings) for name, report in reports.items()} == {
        "whole, averaged": ("undetermined", []),
        "whole, summed": ("undetermined", []),
        "whole, summed, losses added up": ("undetermined", []),
        "whole, divided, summed": ("undetermined", []),
        "own part": ("clean", []),
    }
    for name in VARIANTS[:-1]:
        [reason] = reports[name].reasons
        assert reason.startswith("the gradient of positions is the same on ranks 0 and 1")
        assert ("x 0.5 is right" if "averaged" in name else "It counts 2 times") in reason
        assert "one process" in reports[name].next_step


def test_a_gradient_that_is_whole_on_each_rank_lacks_no_reduction(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A recurrent layer that every rank computes on the whole sequence was accused, though its gradient was right; a
    head of which each rank has a part of the gradient still is."""
    reports = judged_beside(tmp_path_factory, "whole_gradient_workers:train_all_unreduced", UNREDUCED)
    right, wrong = (reports[name] for name in UNREDUCED)
    assert (right.verdict, right.findings) == ("undetermined", [])
    [reason] = right.reasons
    assert "is the same on ranks 0 and 1 without any reduction" in reason and "one process" in right.next_step
    (finding,) = wrong.findings
    assert (finding.code, finding.num_parameters) == ("GS103", 2)
