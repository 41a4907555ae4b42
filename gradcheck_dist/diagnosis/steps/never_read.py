"""Parameters that get gradients which no optimizer reads in any recorded step."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.moved import plain_name
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import plural

NEVER_READ = "no optimizer reads the gradients of"
ELSEWHERE = "of unequal sizes, are not followed"


def leave_unread_open(verdicts: Sequence[StepVerdict]) -> None:
    """A reason where passes of the recorded steps made gradients of parameters that no optimizer on any rank holds:
    whether they were forgotten, or are stepped less often than was recorded, is not known. Or other ranks step all that
    there is of them."""
    if not verdicts or not all(verdict.data.complete for verdict in verdicts):
        return
    made = set[ParamKey]().union(*(verdict.unread.made for verdict in verdicts))
    read = set[ParamKey]().union(*(verdict.unread.read for verdict in verdicts))
    stepped = {(stage, plain_name(name)) for stage, name in read}
    names = sorted(name for stage, name in made - read if (stage, plain_name(name)) not in stepped)
    elsewhere = sorted(name for stage, name in made - read if (stage, plain_name(name)) in stepped)
    if elsewhere:
        verdicts[0].reasons.append(
            f"the gradients of {plural(len(elsewhere), 'parameter')} ({in_short(elsewhere)}) are read on other ranks "
            "alone, which hold them under that name: parts of parameters that are whole while they are used, "
            f"{ELSEWHERE}"
        )
    if read and names:
        verdicts[0].reasons.append(
            f"{NEVER_READ} {plural(len(names), 'parameter')} ({in_short(names)}) in the recorded steps: given to none, "
            "or to one that steps less often"
        )
