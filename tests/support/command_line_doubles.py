"""Types of the fixtures for command line tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run


@dataclass
class Outcome:
    code: int
    out: str
    err: str


class Gradcheck(Protocol):
    def __call__(self, *arguments: object) -> Outcome: ...


@dataclass
class Engine:
    """Stands in for the diagnosis: gives `answer` and remembers what it was asked."""

    answer: Report
    asked: dict[str, Any]

    def diagnose(self, run: object, *, objective: str | None = None, steps: object = None) -> Report:
        self.asked |= {"run": run, "objective": objective, "steps": steps}
        return self.answer

    def diagnose_run(self, path: Path, *, objective: str | None = None, steps: object = None, **_how: object) -> Report:
        return self.diagnose(read_run(path), objective=objective, steps=steps)
