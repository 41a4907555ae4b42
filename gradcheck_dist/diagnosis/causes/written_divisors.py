"""Lines of the trainer's own whose numbers are just what the losses leave to be divided by, beside other changes.

A loop that adds ranks up and divides by them (`dist.all_reduce(p.grad); p.grad /= world_size`) has two parts of one
normalisation: the loss lacks what the line has. Where nothing else is wrong the product tells. Beside a fault that
befell all weights alike, no weight says which of the measured changes the loss's share belongs to; the number that
stands in the program does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

from gradcheck_dist.diagnosis.causes.account import Account, Gap
from gradcheck_dist.diagnosis.causes.culprit import culprit_of_gap
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.own_lines import MOST_LINES, between
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import SIGMAS
from gradcheck_dist.diagnosis.weights.written import is_exactly_written
from gradcheck_dist.events import GradWrite, Site
from gradcheck_dist.ledger.tracks import StepData

Written = tuple[tuple[int, GradWrite], ...]


def free_of_divisors(data: StepData, every: Sequence[Judged]) -> None:
    """Take what such lines divide by out of the losses' share, and out of the brackets in which they stand, where no
    weight is right, they do so to all of them, and something else changed these in another bracket."""
    if any(one.cell.right for one in every):
        return
    found: list[Written] = []
    for one in every:
        lines = _lines(data, one)
        if not lines or not _is_changed_besides(one, lines) or _said(lines) != _said(found[0] if found else lines):
            return
        found.append(lines)
    for one, lines in zip(every, found, strict=True):
        old, gaps, root = one.account, list(one.account.gaps), one.account.root
        for index, write in lines:
            number, gap = write.factor or 1.0, gaps[index]
            gaps[index] = replace(gap, factor=gap.factor / number, written=gap.written * number)
            root *= number
        one.account = Account(root, old.steps, gaps, old.arrived, old.leaf, old.by_hand)


def _said(lines: Written) -> list[tuple[Site | None, float | None]]:
    return [(write.site, write.factor) for _, write in lines]


def _lines(data: StepData, one: Judged) -> Written:
    """The fewest lines that do so together, each with the bracket in which it stands; none where several would do."""
    writes = [(index, write) for index, gap in enumerate(one.account.gaps) for write in _writes(data, one, gap)]
    for size in range(1, min(len(writes), MOST_LINES) + 1):
        fits = [
            lines
            for lines in combinations(writes, size)
            if abs(one.account.documented * prod(write.factor or 1.0 for _, write in lines) - 1) <= SAME
        ]
        if fits:
            return fits[0] if len(fits) == 1 else ()
    return ()


def _is_changed_besides(one: Judged, lines: Written) -> bool:
    """Whether another bracket was changed than one of these lines' own, or several were besides by what they did: where
    their number stands beside one change alone, which comes first matters (a clip of sums)."""
    changed = set()
    for index, gap in enumerate(one.account.gaps):
        rest = gap.factor / prod(write.factor or 1.0 for at, write in lines if at == index)
        if abs(rest - 1) > max(SAME, SIGMAS * gap.noise):
            changed.add(index)
    return len(changed) > 1 or not changed <= {index for index, _ in lines}


def _writes(data: StepData, one: Judged, gap: Gap) -> list[GradWrite]:
    track = data.tracks[one.held.param].get(gap.rank)
    if track is None or gap.inside or gap.start is None or gap.end is None:
        return []
    return [
        event
        for event in between(data, culprit_of_gap(gap, one.account), gap.rank)
        if isinstance(event, GradWrite)
        and track.param.id in data.params_of(gap.rank, event.params)
        and is_exactly_written(event.factor)
    ]
