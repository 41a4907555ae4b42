"""A guard: whatever reason a verdict is left open for in a test, it says what to do now."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.report import conclusion, next_step


@contextlib.contextmanager
def demanded() -> Iterator[None]:
    """No report may fall back on words that fit every reason."""

    def told(report: Report) -> str:
        found = next_step.next_step(report)
        assert found != next_step.OTHERWISE, f"no next step for {report.reasons}: add one to {next_step.__name__}"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conclusion, "next_step", told)
        yield
