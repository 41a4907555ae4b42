"""What a rule answers."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_dist.diagnosis.culprit import Culprit
from gradcheck_dist.diagnosis.finding import Severity


@dataclass(frozen=True)
class Answer:
    """A rule's words for a case: what happened, how to mend it, and, where two causes fit, what would separate them.

    `culprit` replaces the case's own where the rule knows better which event is to blame.
    """

    explanation: str
    fix: str
    severity: Severity = "error"
    suggested_experiment: str | None = None
    culprit: Culprit | None = None
