"""What is done to other gradients on a rank, and not to these: a reduction, or a line that multiplies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gradcheck_dist.diagnosis.causes.places import line_of
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import DATA_PARALLEL, SCALED, GradWrite, Reduce
from gradcheck_dist.ledger.tracks import StepData


def reduced_beside(
    data: StepData, place: Mapping[int, int], held: Sequence[Held], missing: Collection[int]
) -> Reduce | None:
    """The program's own reduction, the last one, of other parameters' gradients over ranks of which one at least has a
    batch (`missing`, data coordinates; `place`: the coordinate of each rank) that never comes to these; None where
    there is none. What a wrapper reduces stands on no line of the program's."""
    found = [
        event
        for rank, event in _of_others(data, held)
        if isinstance(event, Reduce)
        and event.wrapper is None
        and event.impl not in DATA_PARALLEL
        and not {place.get(other) for other in event.group if other != rank}.isdisjoint(missing)
    ]
    return max(found, key=lambda event: event.seq, default=None)


def scaled_beside(data: StepData, held: Sequence[Held], off: float, tolerance: float) -> GradWrite | None:
    """The line that multiplies other gradients by what would put these right, which are `off` by a number; None where
    none was seen, or several do so."""
    found = [
        event
        for _, event in _of_others(data, held)
        if isinstance(event, GradWrite) and event.op == SCALED and abs((event.factor or 0.0) * off - 1) <= tolerance
    ]
    return found[0] if len({line_of(event) for event in found}) == 1 else None


def _of_others(data: StepData, held: Sequence[Held]) -> Iterator[tuple[int, Reduce | GradWrite]]:
    """What lines do to other parameters on the ranks that hold these, with the rank."""
    for rank in sorted({rank for one in held for rank in one.ranks}):
        mine = {data.tracks[one.param][rank].param.id for one in held if rank in data.tracks[one.param]}
        for event in data.events[rank]:
            if not isinstance(event, Reduce | GradWrite) or event.site is None or event.params is None:
                continue
            if mine.isdisjoint(data.params_of(rank, event.params)):
                yield rank, event
