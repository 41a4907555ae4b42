"""Weights that recorded clips of unfinished gradients explain: what each contribution was multiplied by while more was
still to come."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.events import Clip, Reduce
from gradcheck_dist.ledger.buffers import Replay

ACTS = 1e-3
"""A coefficient this close to 1 changes nothing that matters."""


def early_product(replay: Replay, column: int) -> float:
    """What clips made of a contribution on the rank on which it arrived, while the gradient was not complete."""
    product = early = 1.0
    arrived = False
    for entry in replay.history(replay.basis.origin[column]):
        event = entry.event
        grows = isinstance(event, Reduce) or (event is None and not entry.sampled)
        arrived = arrived or (entry.buffer == "grad" and entry.nominal[column] != 0)
        if isinstance(event, Clip) and arrived:
            product *= event.coefficient
        elif grows and entry.clip == 1:  # else all ranks brought the same, clipped alike
            early = product
    return early


def fits(held: Held, cell: Cell) -> bool:
    """Whether a weight is what early clips make of a right one."""
    product = early_product(held.replay, cell.column)
    return abs(cell.ratio - product) <= max(SAME, 2 * cell.tolerance) * product


def first_clip(held: Held, cell: Cell) -> Clip:
    """The first clip on the rank on which a contribution arrived; there is one."""
    entries = held.replay.history(held.replay.basis.origin[cell.column])
    return next(entry.event for entry in entries if isinstance(entry.event, Clip))


def _follow(every: Sequence[Judged]) -> bool:
    """Whether all weights are one multiple of what early clips make of right ones."""
    quotients = [one.cell.ratio / early_product(one.held.replay, one.cell.column) for one in every]
    near = max(SAME, *(2 * one.cell.tolerance for one in every))
    return min(quotients) > 0 and max(quotients) - min(quotients) <= near * max(quotients)


def give_early_clips(every: Sequence[Judged], wrong: Sequence[Judged], *, relative: bool = False) -> bool:
    """Give wrong weights to the clips of unfinished gradients, where these are all that is wrong with the step.
    `relative`: weights are known up to one number that all have in common."""
    if not wrong or not all(early_product(one.held.replay, one.cell.column) < 1 - ACTS for one in wrong):
        return False
    if not (all(fits(one.held, one.cell) for one in every) or (relative and _follow(every))):
        return False
    for one in wrong:
        clip = first_clip(one.held, one.cell)
        rank = one.held.replay.basis.origin[one.cell.column]
        culprit = Culprit("clip", rank, clip, nominal=clip.coefficient, factor=clip.coefficient)
        one.shares = [(culprit, one.cell.ratio)]
    return True
