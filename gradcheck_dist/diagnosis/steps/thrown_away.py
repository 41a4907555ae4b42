"""Backward passes of lines of their own that every step throws away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Backward
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.discarded import emptied_at
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.records import Site
from gradcheck_dist.wording import numbered

OR_LOST = "their tokens are lost: which is true is not known"


class Lines(NamedTuple):
    """Where a pass's loss was evaluated and its backward was called; None where that was not seen."""

    loss: Site | None
    backward: Site | None


def lost_at_own_lines(data: StepData, recorded: Contributions, kept: Contributions) -> str:
    """Where the gradients of the passes come from, and are emptied, that the step throws away, if none of those that it
    keeps goes through the same lines; else ""."""
    lines: dict[bool, set[Lines]] = {True: set(), False: set()}
    for rank, events in data.events.items():
        for event in events:
            if isinstance(event, Backward):
                key = (recorded.coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
                loss = recorded.by_key[key].loss if key in recorded.by_key else None
                lines[key in kept.by_key].add(Lines(loss.site if loss is not None else None, event.site))
    lost = lines[False]
    if not lost or any(None in line for line in lost) or lost & lines[True]:
        return ""
    found = sorted({line.backward.short for line in lost if line.backward is not None})
    return f"the gradients that come from {in_short(found)} are emptied before the optimizer comes{emptied_at(data)}"


def leave_thrown_away_open(verdicts: Sequence[StepVerdict]) -> list[StepVerdict]:
    """The steps as they are without what each of them throws away at lines of its own, every other token weighing what
    it should without it. So statistics of gradients are taken, and attacks on the input computed from another batch. A
    step that loses what belongs to it divides by its tokens as well, or loses what one line of a loop made."""
    chosen = [verdict.without_lost for verdict in verdicts if verdict.without_lost is not None and verdict.lost_at]
    if not chosen or len(chosen) < len(verdicts):
        return list(verdicts)
    chosen[0].reasons.append(
        f"{numbered('step', [one.context.step for one in chosen])}: {verdicts[0].lost_at}. All other tokens weigh what "
        "they should without these passes, so that they may be meant for something else (statistics, an attack on the "
        f"input); if they belong to the step, {OR_LOST}"
    )
    return chosen
