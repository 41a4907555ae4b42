"""Losses that weigh contributions apart, and a line of the trainer's that makes them weigh alike again: means of passes
whose gradients are multiplied by their tokens. What all weights are off by besides is not the losses' doing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from gradcheck_dist.diagnosis.causes.account import Account, Gap
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.places import kind_of, line_of
from gradcheck_dist.diagnosis.weights.cells import Held

Start = tuple[str, tuple[str, int] | None]
"""What an event is, and its line."""


def off_alike(matrix: Sequence[Held]) -> bool:
    """Whether all weights of a step are off by one number."""
    cells = [cell for held in matrix for cell in held.cells]
    if len(cells) < 2 or any(cell.right or not cell.ratio for cell in cells):
        return False
    best = min(cells, key=lambda cell: cell.margin)
    return all(abs(cell.ratio - best.ratio) <= cell.margin + best.margin for cell in cells)


def laid_together(every: Sequence[Judged]) -> bool:
    """Lay what losses weigh contributions apart by to the one unrecorded change that undoes it, where there is one."""
    low, high = (bound((one.account.root for one in every), default=0.0) for bound in (min, max))
    tolerance = max((one.tolerance for one in every), default=0.0)
    if not 0 < low < high * (1 - 2 * tolerance):
        return False
    changes = [by_place(one.account.gaps) for one in every]
    for place in [place for place in changes[0] if all(place in gaps for gaps in changes)]:
        left = [
            one.account.root * prod(gap.factor for gap in gaps[place]) for one, gaps in zip(every, changes, strict=True)
        ]
        alike = 0 < max(left) <= min(left) * (1 + 2 * tolerance)
        if not alike or not all(step.factor for one in every for step in one.account.steps):
            continue
        for one, gaps, factor in zip(every, changes, left, strict=True):
            old, loudest = one.account, max(gaps[place], key=lambda gap: abs(gap.factor - 1))
            rest = [gap for gap in old.gaps if gap is loudest or all(gap is not other for other in gaps[place])]
            steps = prod(step.factor for step in old.steps)  # what losses are to make up for
            rest = [replace(gap, factor=factor * steps) if gap is loudest else gap for gap in rest]
            one.account = Account(1 / steps, old.steps, rest, old.arrived, old.leaf, old.by_hand)
        return True
    return False


def by_place(gaps: Iterable[Gap]) -> dict[Start | None, list[Gap]]:
    """By the line behind which they lie: what comes next may differ by pass, and a communication hook of the rank's own
    is inside of an event where another rank's is not."""
    found: dict[Start | None, list[Gap]] = {}
    for gap in gaps:
        start = (kind_of(gap.start), line_of(gap.start)) if gap.start is not None else None
        found.setdefault(start, []).append(gap)
    return found
