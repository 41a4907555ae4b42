"""Parameters that get gradients which no optimizer reads in any recorded step."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import plural

NEVER_READ = "no optimizer reads the gradients of"


def leave_unread_open(verdicts: Sequence[StepVerdict]) -> None:
    """A reason where passes of the recorded steps made gradients of parameters that no optimizer on any rank holds:
    whether they were forgotten, or are stepped less often than was recorded, is not known."""
    if not verdicts or not all(verdict.data.complete for verdict in verdicts):
        return
    made = set[ParamKey]().union(*(verdict.unread.made for verdict in verdicts))
    read = set[ParamKey]().union(*(verdict.unread.read for verdict in verdicts))
    names = sorted(name for _, name in made - read)
    if read and names:
        verdicts[0].reasons.append(
            f"{NEVER_READ} {plural(len(names), 'parameter')} ({in_short(names)}) in the recorded steps: given to none, "
            "or to one that steps less often"
        )
