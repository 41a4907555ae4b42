"""What one line did to some gradients by its records, and to others without any: one hand.

A number inside of an event may be recorded for some parameters and not for others: a function that divides what it
reduces is recorded with its divisor where its result lies as it was summed, and not where it is a copy of some columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradcheck_dist.diagnosis.causes.account import Account, Gap, Step, same_doing
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.places import line_of
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import SIGMAS
from gradcheck_dist.events import Event, Reduce

Place = tuple[object, ...]


def join_lines(every: Sequence[Judged]) -> None:
    """Give what was measured inside of a reduction to its records, where these have just that factor for other
    parameters which the same line reduces over the same ranks."""
    accounts = list({id(one.account): one.account for one in every}.values())
    known: dict[Place, dict[float, Step]] = {}
    for account in accounts:
        for step in account.steps:
            place = _place(step.event)
            if place is not None and not step.opaque and step.factor:
                known.setdefault(place, {}).setdefault(round(step.factor, 9), step)
    for account in accounts:
        for index, gap in enumerate(account.gaps):
            if same_doing(gap.start, gap.end) and gap.factor > 0 and abs(gap.factor - 1) > _noise(gap):
                _join(account, index, gap, known.get(_place(gap.end) or (), {}))


def _join(account: Account, index: int, gap: Gap, known: dict[float, Step]) -> None:
    mine = [at for at, step in enumerate(account.steps) if step.event is gap.end and not step.opaque and step.factor]
    if len(mine) != 1:
        return
    own = account.steps[mine[0]]
    near = [
        step
        for step in known.values()
        if step.hand != own.hand and abs(own.factor * gap.factor / step.factor - 1) <= _noise(gap)
    ]
    if len(near) != 1:
        return
    account.gaps[index] = replace(gap, factor=own.factor * gap.factor / near[0].factor)
    account.steps[mine[0]] = replace(own, factor=near[0].factor, like=near[0])
    for at, step in enumerate(account.steps):  # it passed what was reduced before on, as it was
        if step.hand == own.hand and step.factor == 1:
            account.steps[at] = replace(step, like=near[0])


def _noise(gap: Gap) -> float:
    return max(SAME, SIGMAS * gap.noise)


def _place(event: Event | None) -> Place | None:
    """Equal for reductions of one line over the same ranks; None for what is none, or whose line is not known."""
    if not isinstance(event, Reduce) or event.site is None:
        return None
    return (event.impl, event.hook, tuple(event.group), tuple(event.replicate_group), line_of(event))
