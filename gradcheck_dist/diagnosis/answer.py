"""What a rule answers."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.finding import Factor, Severity


@dataclass(frozen=True)
class Answer:
    """A rule's words for a case: what happened, how to mend it, and, where two causes fit, what would separate them.

    `culprit` replaces the case's own where the rule knows better which event is to blame; `factor` and `pattern` do,
    where what one rank holds says more than single weights in it.
    """

    explanation: str
    fix: str
    severity: Severity = "error"
    suggested_experiment: str | None = None
    culprit: Culprit | None = None
    factor: Factor | None = None
    pattern: str | None = None
