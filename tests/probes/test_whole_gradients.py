"""A gradient that backward makes whole on each of several ranks with parts of their own counts once, or for each."""

from __future__ import annotations

import pytest
from beside import judged_beside
from whole_gradient_workers import VARIANTS


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
