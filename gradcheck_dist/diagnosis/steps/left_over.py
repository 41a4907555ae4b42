"""Steps of which a part of the trace is lost: named with the damage, and left open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.events import StepEnd
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import numbered


def say_lost(run: Run, verdicts: Sequence[StepVerdict], whole: Sequence[StepVerdict]) -> None:
    """Say of which steps something is lost. Steps behind the last one that came to an end on every rank (`whole`) were
    cut off with the run, which is told elsewhere."""
    last = max((verdict.context.step for verdict in whole), default=None)
    ended = {rank: {event.step for event in trace.events if isinstance(event, StepEnd)}
             for rank, trace in run.ranks.items()}  # fmt: skip
    told: dict[str, list[tuple[int, StepVerdict]]] = defaultdict(list)
    for verdict in verdicts:
        step, of_rank = verdict.context.step, dict(verdict.lost)
        if last is not None and step > last:
            continue
        teller = verdict if last is None or verdict in whole else whole[0]
        if teller is not verdict:
            unended = [rank for rank, steps in ended.items() if step not in steps and max(steps, default=-1) > step]
            of_rank = dict.fromkeys(unended, "the last records") | of_rank
        for rank, words in sorted(of_rank.items()):
            told[f"rank {rank}'s trace lacks {words}{_damage(run, rank)}"].append((step, teller))
    for why, of_steps in told.items():
        steps = sorted({step for step, _ in of_steps})
        reason = f"{numbered('step', steps)} {'is' if len(steps) == 1 else 'are'} not judged: {why}"
        for teller in {id(one): one for _, one in of_steps}.values():
            teller.reasons.append(reason)


def _damage(run: Run, rank: int) -> str:
    found = run.ranks[rank].damage
    if not found:
        return ", and no damage is seen: whole frames are gone, or the rank did not come so far"
    return f" and is damaged: {found[0]}" + (f", and at {len(found) - 1} further places" if len(found) > 1 else "")
