"""The trainer's own line between two recorded events that did what nothing else there did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, prod

from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.places import kind_of, line_of
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.diagnosis.weights.written import SIMPLE, is_exactly_written, is_written
from gradcheck_dist.events import SCALED, WRITTEN, Backward, Event, GradWrite, Reduce
from gradcheck_dist.ledger.reductions import nominal_factor
from gradcheck_dist.ledger.tracks import StepData

EXACT = 1e-6
MEASURED = 1e-5
"""Relative; how well a factor is known of which a recorded number is taken out."""
MOST_LINES = 3
"""Lines that divide by one number together: by ranks, passes and tokens."""


def behind_bare_sum(
    data: StepData,
    culprit: Culprit,
    held: Sequence[Held],
    off: float,
    tolerance: float,
    quantities: Mapping[str, float],
) -> Culprit:
    """The culprit, narrowed to the line that divides where its losses are bare sums.

    Of a loss and an unrecorded change behind it either may have the wrong number. A sum that enters with 1 has none,
    though: where one line did all of the change, by a number in which tokens are counted, that count is wrong. A line
    that divides by degrees alone may be right, and the tokens missing before the loss; then the bracket stays. One that
    divides by just the tokens of the step is right: a reduction that averages is then one hand too many.

    Args:
        held, off, tolerance: as for `line_between`.
        quantities: degrees and counts of the step.
    """
    gradient = culprit.gradient
    bare = gradient is not None and gradient.weight is not None and abs(gradient.weight - 1) <= EXACT
    if not (bare and culprit.kind == "loss" and culprit.unrecorded and culprit.factor):
        return culprit
    if any(cell.right for one in held for cell in one.cells):
        return culprit  # the line did the same to these
    write = line_between(data, replace(culprit, kind="backward"), held, off, tolerance)
    if write is None or not _is(write.factor, culprit.factor, tolerance):
        return culprit
    degrees = {name: number for name, number in quantities.items() if name != "num_tokens"}
    number = abs(write.factor or 1.0)
    if abs(number * quantities.get("num_tokens", 0.0) - 1) <= EXACT:
        return _averaged(culprit, held, off, tolerance) or culprit
    if _is_named(number, degrees):
        return culprit
    rank = rank_of(data, write)
    earlier = [event for event in data.events[rank] if isinstance(event, Backward | Reduce) and event.seq < write.seq]
    start = max(earlier, key=lambda event: event.seq, default=None)
    if start is None:
        return culprit
    return replace(culprit, kind=kind_of(start), rank=rank, event=start, gradient=None, nominal=1.0)


def _averaged(culprit: Culprit, held: Sequence[Held], off: float, tolerance: float) -> Culprit | None:
    """The recorded reduction whose documented factor is what every one of these gradients is off by; None for none."""
    found: list[tuple[int, Reduce]] = []
    for one in held:
        reductions = [e.event for e in one.replay.history(one.rank) if isinstance(e.event, Reduce)]
        such = [event for event in reductions if _is(nominal_factor(event), off, tolerance)]
        if not such:
            return None
        found.append((one.rank, such[-1]))
    rank, event = found[0]
    factor = nominal_factor(event)
    return replace(
        culprit, kind="reduce", rank=rank, event=event, before=None, unrecorded=False, gradient=None, nominal=factor,
        factor=factor,
    )  # fmt: skip


def rank_of(data: StepData, event: Event) -> int:
    """The rank on which an event of a step was recorded."""
    return next(rank for rank, events in data.event_of.items() if events.get(event.seq) is event)


def line_that_differs(
    data: StepData, culprit: Culprit, cells: Sequence[tuple[Held, Cell]], tolerance: float
) -> GradWrite | None:
    """The line that multiplied gradients apart, in an unrecorded change that differs between them: its numbers differ
    between parameters and ranks as the weights do, up to one factor which all share. Where it wrote to a gradient that
    is wrong, if it did to any. None where not just one does.

    Args:
        cells: the weights that the change left, with the gradients that they stand in.
        tolerance: relative.
    """
    if not culprit.unrecorded or culprit.in_flight or culprit.unheard or None in (culprit.event, culprit.before):
        return None
    ratios: dict[int, tuple[Held, float]] = {}
    for held, cell in cells:
        known = ratios.setdefault(id(held), (held, cell.ratio))[1]
        if not _is(cell.ratio, known, tolerance + 2 * cell.margin / max(abs(cell.ratio), 1e-12)):
            return None
    low, high = (bound((ratio for _, ratio in ratios.values()), default=1.0) for bound in (min, max))
    if low <= 0 or high <= low * (1 + max(1e-3, tolerance)):
        return None
    lines: dict[tuple[str, int], dict[int, list[GradWrite]]] = {}
    for rank in {rank for held, _ in ratios.values() for rank in held.ranks}:
        for event in _writes(data, culprit, rank):
            if event.site is not None and event.params is not None:
                lines.setdefault((event.site.file, event.site.line), {}).setdefault(rank, []).append(event)
    found = [of_rank for of_rank in lines.values() if _differs_so(data, of_rank, list(ratios.values()), tolerance)]
    if len(found) != 1:
        return None
    (of_rank,) = found
    at_wrong = (write for held, cell in cells if not cell.right for write in _of_held(data, of_rank, held))
    return next(at_wrong, None) or next(write for writes in of_rank.values() for write in writes)


def _of_held(data: StepData, of_rank: Mapping[int, Sequence[GradWrite]], held: Held) -> list[GradWrite]:
    """The writes to one gradient."""
    track = data.tracks[held.param].get(held.rank)
    return [one for one in of_rank.get(held.rank, ())
            if track is not None and track.param.id in data.params_of(held.rank, one.params)]  # fmt: skip


def _differs_so(
    data: StepData, of_rank: Mapping[int, Sequence[GradWrite]], ratios: Sequence[tuple[Held, float]], tolerance: float
) -> bool:
    shared = []
    for held, ratio in ratios:
        mine = _of_held(data, of_rank, held)
        if any(not one.factor for one in mine):
            return False
        shared.append(ratio / prod(one.factor or 1.0 for one in mine))
    return all(_is(one, shared[0], tolerance) for one in shared)


def _writes(data: StepData, culprit: Culprit, rank: int) -> list[GradWrite]:
    return [one for one in between(data, culprit, rank) if isinstance(one, GradWrite) and one.op == SCALED]


def between(data: StepData, culprit: Culprit, rank: int) -> list[Event]:
    """What a rank recorded between the events of an unrecorded change, each of which it has at its own time."""
    first, last = (_counterpart(data, event, rank) for event in (culprit.event, culprit.before))
    begin, end = first.seq if first is not None else -1, last.seq if last is not None else inf
    return [event for event in data.events[rank] if begin < event.seq < end]


def _counterpart(data: StepData, event: Event | None, rank: int) -> Event | None:
    """The last event of a rank that is of the same kind and line."""
    if event is None or data.event_of[rank].get(event.seq) is event:
        return event
    alike = [one for one in data.events[rank] if type(one) is type(event) and line_of(one) == line_of(event)]
    return alike[-1] if alike else None


@dataclass(frozen=True)
class Beside:
    """A number of the program by which an unrecorded change multiplied gradients besides one that is computed (a clip's
    coefficient). `behind` is as much of it as stands behind the computed one."""

    number: float = 1.0
    behind: float = 1.0


def beside_computed(
    data: StepData, culprit: Culprit, held: Sequence[Held], quantities: Mapping[str, float] | None = None
) -> Beside:
    """1 where there is no such number, or what its lines do is not known. Of the two one may be none of a line that was
    seen: `p.grad = torch.div(p.grad, 3)`. Numbers are known by their digits, or made of `quantities`."""
    quantities = quantities or {}
    if culprit.event is None or culprit.before is None or not culprit.factor:
        return Beside()
    rank = rank_of(data, culprit.before)
    params = params_on(data, held, rank)
    lines: dict[tuple[str, int], dict[int, float]] = {}
    for event in _writes(data, culprit, rank):
        mine = params & set(data.params_of(rank, event.params)) if event.params is not None else set()
        line = line_of(event)
        if mine and (line is None or not event.factor):
            return Beside()
        of_line = lines.setdefault(line, {}) if mine and line is not None else {}
        for param in mine:
            of_line[param] = of_line.get(param, 1.0) * (event.factor or 1.0)
    even = [one.keys() == params and len(set(one.values())) == 1 for one in lines.values()]
    numbers = [next(iter(one.values())) for one, alike in zip(lines.values(), even, strict=True) if alike]
    uneven = [number for one, alike in zip(lines.values(), even, strict=True) if not alike for number in one.values()]
    if not numbers or not all(map(is_exactly_written, uneven)):
        return Beside()
    written = [one for one in numbers if is_exactly_written(one) or (quantities and _is_named(one, quantities))]
    computed = [one for one in numbers if one not in written]
    rest = culprit.factor / prod(numbers)
    if not computed and not uneven and abs(rest - 1) > EXACT and not is_written(rest, MEASURED, quantities):
        return Beside(prod(written), prod(written))
    if len(computed) != 1:
        return Beside()
    # Where lines do not act alike, reductions in between made up for it: all of it but the computed number is one.
    rest = culprit.factor / computed[0] if uneven else rest
    known = 1.0 if uneven else prod(written)
    if abs(rest - 1) > (MEASURED if uneven else EXACT):
        if not is_written(rest, MEASURED, quantities):
            return Beside()
        known *= rest
    return Beside(known, prod(numbers[numbers.index(computed[0]) + 1 :]))


def _is_named(number: float, quantities: Mapping[str, float]) -> bool:
    return any(name.cost < SIMPLE for name in name_number(abs(number), quantities, EXACT))


def params_on(data: StepData, held: Iterable[Held], rank: int) -> set[int]:
    """The ids that a rank's records give to these parameters."""
    return {data.tracks[one.param][rank].param.id for one in held if rank in data.tracks[one.param]}


def is_divided(data: StepData, culprit: Culprit, held: Sequence[Held], divisor: float) -> bool:
    """Whether lines were seen that divide all of these gradients by a number between the events of an unrecorded
    change: one of them, or several together (by ranks, then by passes)."""
    if culprit.event is None or culprit.before is None:
        return False
    rank = rank_of(data, culprit.before)
    params = params_on(data, held, rank)
    lines: dict[tuple[tuple[str, int] | None, float], set[int]] = {}
    for event in _writes(data, culprit, rank):
        if event.factor and event.params is not None:
            lines.setdefault((line_of(event), event.factor), set()).update(data.params_of(rank, event.params))
    numbers = [number for (_, number), of_line in lines.items() if params <= of_line]
    some = (chosen for size in range(1, MOST_LINES + 1) for chosen in combinations(numbers, size))
    return any(_is(prod(chosen), 1 / divisor, 0.0) for chosen in some)


def lines_within(data: StepData, culprit: Culprit, held: Sequence[Held]) -> tuple[str, ...]:
    """The lines that wrote to these gradients between the events of an unrecorded change: on its rank or, where none
    did so there, on others that hold them (those that a broadcast overwrites)."""
    if not culprit.unrecorded or culprit.event is None or culprit.before is None:
        return ()
    for rank in dict.fromkeys([rank_of(data, culprit.before), *(rank for one in held for rank in one.ranks)]):
        params = params_on(data, held, rank)
        within = _that_befall(data, culprit, rank, between(data, culprit, rank), params)
        if found := lines_that_write(data, rank, params, within, known=True):
            return found
    return ()


def _that_befall(
    data: StepData, culprit: Culprit, rank: int, events: Iterable[Event], params: Set[int]
) -> list[GradWrite]:
    """What wrote to one of these gradients between this one's own events: a loop that reduces one gradient and divides
    it comes to the next one behind that, and a later pass to all of them again."""
    starts, ends = (_own_numbers(data, one, rank, params) for one in (culprit.event, culprit.before))
    return [
        event
        for event in events
        if isinstance(event, GradWrite)
        and any(
            starts.get(param, -1) < event.seq < ends.get(param, inf)
            for param in params & set(data.params_of(rank, event.params))
        )
    ]


def _own_numbers(data: StepData, event: Event | None, rank: int, params: Set[int]) -> Mapping[int, int]:
    """By parameter, the number of what a rank recorded of it where an event of another's is: as often before."""
    event = _counterpart(data, event, rank)
    if event is None:
        return {}
    of_event = data.params_of(rank, getattr(event, "params", None))
    if not of_event:
        return dict.fromkeys(params, event.seq)
    numbers: dict[int, list[int]] = defaultdict(list)
    for one in data.events[rank]:
        if type(one) is type(event) and line_of(one) == line_of(event):
            for param in data.params_of(rank, getattr(one, "params", None)):
                numbers[param].append(one.seq)
    place = numbers[of_event[0]].index(event.seq)
    return {param: found[place] for param, found in numbers.items() if place < len(found)}


def lines_that_write(
    data: StepData, rank: int, params: Set[int], events: Iterable[Event], *, known: bool = False
) -> tuple[str, ...]:
    """The lines of `events` that changed gradients of a rank's parameters, or parts of them, by no one number; also
    those of `known` numbers, where asked for."""
    found = [
        one.site.short
        for one in events
        if isinstance(one, GradWrite) and one.site is not None and one.params is not None
        if known or one.op == WRITTEN or one.factor is None
        if not params.isdisjoint(data.params_of(rank, one.params))
    ]
    return tuple(dict.fromkeys(found))


def line_between(
    data: StepData, culprit: Culprit, held: Sequence[Held], off: float, tolerance: float
) -> GradWrite | None:
    """The recorded write to a gradient (probes/optimizers/writes.py) that an unrecorded change is laid to.

    Args:
        held: the gradients that are wrong.
        off: the factor by which they are wrong, of the relative `tolerance`.

    Returns:
        The only line whose number is what they are off by, else the only one whose number was measured there, else the
        only line that wrote to them, unless its numbers are known and others; None where several would do. Where none
        wrote to these gradients, a line that multiplied another tensor by this very number: a buffer from which they
        were filled. Behind a loss only what they are off by counts.
    """
    if not culprit.unrecorded or culprit.event is None or culprit.in_flight or culprit.unheard:
        return None
    if culprit.spared is not None:
        return _of_the_others(data, culprit, tolerance)
    rank = rank_of(data, culprit.before) if culprit.before is not None else culprit.rank
    # A stage's gradients have their losses on another rank, whose clock is not this one's.
    begin = culprit.event.seq if data.event_of[rank].get(culprit.event.seq) is culprit.event else -1
    end = culprit.before.seq if culprit.before is not None else inf
    tracks = (data.tracks[one.param].get(rank) for one in held)
    params = {track.param.id for track in tracks if track is not None}
    between = [
        event
        for event in data.events[rank]
        if isinstance(event, GradWrite) and event.site is not None and begin < event.seq < end
        if event.factor != 1 and (event.op != WRITTEN or event.factor is not None)
    ]
    owners = {one.seq: set(data.params_of(rank, one.params)) for one in between if one.params is not None}
    others = [one for one in between if params.isdisjoint(owners.get(one.seq, ()))]
    mine = _that_befall(data, culprit, rank, between, params)
    writes, between = [one for one in mine if one.op != WRITTEN], sorted([*others, *mine], key=lambda one: one.seq)
    values = (off,) if culprit.kind == "loss" else (off, culprit.factor)  # it may be the loss that is wrong
    for value in values:
        such = [one for one in writes or between if _is(one.factor, value, tolerance)]
        if len({line_of(one) for one in such}) == 1:
            return such[0]
        if such:
            return None
    if len({line_of(one) for one in writes}) != 1 or culprit.kind == "loss":
        return None
    # One line, run more than once on a gradient, or by what is no one number.
    known = [one.factor for one in writes if min(params) in owners[one.seq] and one.factor is not None]
    unknown = any(one.factor is None for one in writes)
    return writes[0] if unknown or any(_is(prod(known), value, tolerance) for value in values) else None


def _of_the_others(data: StepData, culprit: Culprit, tolerance: float) -> GradWrite | None:
    """The line that did to other gradients what these were spared; None where several may have done it, or it happened
    inside of a backward pass, behind which lines come."""
    if isinstance(culprit.before, Backward):
        return None
    such = [
        event
        for events in data.events.values()
        for event in events
        if isinstance(event, GradWrite) and event.site is not None and _is(event.factor, culprit.spared, tolerance)
    ]
    return such[0] if len({line_of(event) for event in such}) == 1 else None


def _is(factor: float | None, value: float | None, tolerance: float) -> bool:
    return bool(value and factor and abs(factor / value - 1) <= max(1e-3, tolerance))
