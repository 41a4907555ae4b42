"""What the records of a step leave unexplained, also where every weight is right.

A probe that misses a reduction shows on no correct run: what other ranks brought is measured all the same. It shows
when the run is wrong, as a finding that can name no event. So correct runs are asked whether their records account for
every weight.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.account import Gap, account
from gradcheck_dist.diagnosis.causes.places import kind_of
from gradcheck_dist.diagnosis.causes.routes import route
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.cells import SIGMAS, Cell, Held
from gradcheck_dist.wording import plural

LEAST = 1e-2
"""Factors nearer to 1 than this are not told: correct runs are asked in every number format."""


def unexplained(verdict: StepVerdict) -> list[str]:
    """Each kind of change that was measured and not recorded, in words; empty where the records explain everything."""
    place = verdict.contributions.coordinate
    found: dict[str, int] = {}
    for held in verdict.held:
        for cell in held.cells:
            story = account(verdict.data, held, cell)
            told = [_words(gap) for gap in story.gaps if _loud(gap, cell)]
            if story.by_hand and place.get(held.rank) != cell.key[0] and not _came_beside(verdict, held, cell):
                told.append("what other ranks brought came by no recorded reduction")
            for words in told:
                found[words] = found.get(words, 0) + 1
    return [f"{words} ({plural(count, 'weight')})" for words, count in found.items()]


def _came_beside(verdict: StepVerdict, held: Held, cell: Cell) -> bool:
    """Whether recorded reductions brought a contribution to a rank that is a part of the same model on the same tokens:
    what parts give one another there (tensor parallelism, tied stages) is no reduction over data."""
    if held.param in verdict.data.beside:
        return True  # by the reduction of the parameter that it is tied to
    place, replay, column = verdict.contributions.coordinate, held.replay, cell.column
    origins = {rank for (rank, *_), index in replay.basis.of.items() if index == column}
    beside = {rank for rank in replay.entries if rank != held.rank and place.get(rank) == place.get(held.rank)}
    return any(route(replay, column, origin, rank)[1] for origin in origins for rank in beside)


def _loud(gap: Gap, cell: Cell) -> bool:
    return not gap.inside and abs(gap.factor - 1) > max(LEAST, 2 * cell.tolerance, SIGMAS * gap.noise)


def _words(gap: Gap) -> str:
    start, end = (kind_of(event) if event is not None else "the loss" for event in (gap.start, gap.end))
    return f"x {gap.factor:.3g} between {start} and {end} by nothing recorded"
