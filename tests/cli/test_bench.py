"""gradcheck bench: figures of this machine, in words and as JSON."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from command_line_doubles import Gradcheck

from gradcheck_dist.cli import bench

FOUND: dict[str, Any] = {
    "plain_ms": 5.0,
    "ratios": {"every step with samples": [1.1, 1.2, 1.3], "between recorded steps": [0.99, 1.0, 1.01]},
    "trace_bytes_per_step": 61_000.0,
    "judge_ms_per_step": 40.0,
    "times_the_read": 900.0,
    "torch": "2.13.0",
}


def test_figures_are_told_as_ratios_with_their_spread(monkeypatch: pytest.MonkeyPatch, gradcheck: Gradcheck) -> None:
    monkeypatch.setattr(bench, "_measure", lambda rounds: FOUND | {"rounds": rounds})
    monkeypatch.setattr(bench, "_help_ratio", lambda: 2.4)
    text = gradcheck("bench", "--rounds", "3").out
    assert "every step with samples" in text
    assert "1.200 times the step [1.100, 1.300]" in text
    assert json.loads(gradcheck("bench", "--format", "json").out)["rounds"] == 9


def test_a_measurement_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, gradcheck: Gradcheck) -> None:
    def run(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "Traceback ...\nModuleNotFoundError: No module named 'torch'\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    outcome = gradcheck("bench")
    assert outcome.code == 2
    assert "No module named 'torch'" in outcome.err


@pytest.mark.slow
@pytest.mark.long
def test_it_measures(gradcheck: Gradcheck) -> None:
    found = json.loads(gradcheck("bench", "--rounds", "2", "--format", "json").out)
    assert found["plain_ms"] > 0
    assert all(low <= median <= high for low, median, high in found["ratios"].values())
    assert found["trace_bytes_per_step"] > 1000
