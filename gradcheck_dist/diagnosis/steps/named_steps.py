"""In which steps a reason holds, where others are without it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.wording import numbered

NAMED = re.compile(r"(?<!accumulation )\bsteps? \d")


def name_steps(verdicts: Sequence[StepVerdict], of_steps: Collection[str]) -> None:
    """Say which steps a reason of single steps (`of_steps`) is about, unless it is about all, or says so itself."""
    holds: dict[str, list[int]] = defaultdict(list)
    for verdict in verdicts:
        for reason in dict.fromkeys(verdict.reasons):
            holds[reason].append(verdict.context.step)
    named = {
        reason: f"{numbered('step', steps)}: {reason}"
        for reason, steps in holds.items()
        if reason in of_steps and len(steps) < len(verdicts) and not NAMED.search(reason)
    }
    for verdict in verdicts:
        verdict.reasons = [named.get(reason, reason) for reason in verdict.reasons]
