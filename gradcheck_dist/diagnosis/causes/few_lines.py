"""Lines of the program's own that multiply a few gradients by a number, beside what is wrong with most of them.

Where most gradients are off alike, and those few by just that number more, two things happened: they are freed of the
number, which is a cause of its own, before the others' is looked for. Else a number that makes up for what is wrong
with the others would make these look right, and the others left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from gradcheck_dist.diagnosis.causes.account import Account
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.places import kind_of, line_of
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.written import number_of_line
from gradcheck_dist.events import Backward, GradWrite, Reduce
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.tracks import StepData

Line = tuple[str, int]
Place = tuple[ContributionKey, int]
"""A contribution, and the rank on which it is weighed."""


@dataclass
class OfLine:
    """What a line did to some gradients: `cells` are as they were judged, `number` is what it multiplies by."""

    culprit: Culprit
    number: float
    cells: list[tuple[Held, Cell]]


def free_of_few(data: StepData, every: Sequence[Judged]) -> list[OfLine]:
    """Free weights of the numbers of such lines. A division is left where it is: of an average by hand, others may lack
    both halves.

    Returns:
        What each line did.
    """
    found = []
    for writes in _lines(data):
        touched = [one for one in every if _writes_to(data, writes, one)]
        numbers = {round(_number(data, writes, one), 12) for one in touched}
        number = numbers.pop() if len(numbers) == 1 else 1.0
        others = [one for one in every if not _writes_to(data, writes, one)]
        if abs(number) <= 1 or 2 * _num_held(touched) >= _num_held(every) or not _off_by(number, touched, others):
            continue
        if _left_out(touched, others):
            continue
        freed = [_freed(data, writes, one, number) for one in touched]
        if any(account is None for account in freed):
            continue
        culprit = _culprit(data, writes, touched[0], number)
        if culprit is None:
            continue
        found.append(OfLine(culprit, number, [(one.held, one.cell) for one in touched]))
        for one, account in zip(touched, freed, strict=True):
            one.cell, one.account = _without(one.cell, number), account or one.account
    return found


def _num_held(judged: Sequence[Judged]) -> int:
    return len({id(one.held) for one in judged})


def _left_out(touched: Sequence[Judged], others: Sequence[Judged]) -> bool:
    """Whether the line may be what all others lack: what it touched is right, and there is something of it on each rank
    that holds others which are wrong."""
    there = {one.held.rank for one in touched}
    wrong = {one.held.rank for one in others if not one.cell.right}
    return wrong <= there and all(one.cell.right for one in touched)


def _lines(data: StepData) -> Iterator[dict[int, list[GradWrite]]]:
    """What each line that multiplies by a written number wrote, by rank."""
    lines: dict[Line, dict[int, list[GradWrite]]] = defaultdict(lambda: defaultdict(list))
    for rank, events in data.events.items():
        for event in events:
            line = line_of(event)
            if line is not None and isinstance(event, GradWrite) and number_of_line(event) not in (None, 1):
                lines[line][rank].append(event)
    yield from lines.values()


def _of(data: StepData, writes: Mapping[int, Sequence[GradWrite]], one: Judged) -> list[GradWrite]:
    rank, track = one.held.rank, data.tracks[one.held.param].get(one.held.rank)
    if track is None:
        return []
    return [write for write in writes.get(rank, ()) if track.param.id in data.params_of(rank, write.params)]


def _writes_to(data: StepData, writes: Mapping[int, Sequence[GradWrite]], one: Judged) -> bool:
    return bool(_of(data, writes, one))


def _number(data: StepData, writes: Mapping[int, Sequence[GradWrite]], one: Judged) -> float:
    """What a line multiplies a gradient by; 1 where it does so more than once."""
    factors = [write.factor or 1.0 for write in _of(data, writes, one)]
    return factors[0] if len(factors) == 1 else 1.0


def _off_by(number: float, touched: Sequence[Judged], others: Sequence[Judged]) -> bool:
    """Whether most others are off alike on each place, and what a line touched by its number more."""
    places: dict[Place, list[Cell]] = defaultdict(list)
    for one in others:
        places[one.cell.key, one.held.rank].append(one.cell)
    usual: dict[Place, Cell] = {}
    for place, cells in places.items():
        middle = median(cell.ratio for cell in cells)
        alike = [cell for cell in cells if abs(cell.ratio - middle) <= cell.margin + SAME * abs(middle)]
        if 2 * len(alike) > len(cells):
            usual[place] = min(alike, key=lambda cell: abs(cell.ratio - middle))
    wrong = False
    for one in touched:
        like = usual.get((one.cell.key, one.held.rank))
        if like is None:
            return False
        near = one.cell.margin / abs(number) + like.margin + SAME * abs(like.ratio)
        if abs(one.cell.ratio / number - like.ratio) > near:
            return False
        wrong = wrong or not like.right
    return wrong


def _freed(data: StepData, writes: Mapping[int, Sequence[GradWrite]], one: Judged, number: float) -> Account | None:
    """An account without the number, in the bracket in which the line stands; None where it stands in none."""
    (write,) = _of(data, writes, one)
    old, gaps = one.account, list(one.account.gaps)
    for index, gap in enumerate(gaps):
        begin = gap.start.seq if gap.start is not None else -1
        within = gap.end is None or write.seq < gap.end.seq
        if gap.rank == one.held.rank and not gap.inside and begin < write.seq and within:
            gaps[index] = replace(gap, factor=gap.factor / number)
            return Account(old.root, old.steps, gaps, old.arrived, old.leaf, old.by_hand)
    return old if not old.arrived else None


def _culprit(data: StepData, writes: Mapping[int, Sequence[GradWrite]], one: Judged, number: float) -> Culprit | None:
    """The line, behind the last pass or reduction in front of it."""
    rank, (write,) = one.held.rank, _of(data, writes, one)
    earlier = [event for event in data.events[rank] if isinstance(event, Backward | Reduce) and event.seq < write.seq]
    start = max(earlier, key=lambda event: event.seq, default=None)
    end = next((gap.end for gap in one.account.gaps if gap.end is not None and gap.end.seq > write.seq), None)
    if start is None or end is None:
        return None
    return Culprit(kind_of(start), rank, start, nominal=1.0, factor=number, unrecorded=True, before=end)


def _without(cell: Cell, number: float) -> Cell:
    """A cell without a factor that is known exactly: as well known, relatively."""
    ratio = cell.ratio / number
    stderr = cell.stderr * max(abs(cell.ratio), 1.0) / max(abs(ratio), 1.0) / abs(number)
    return replace(cell, ratio=ratio, stderr=stderr)
