"""What the records of a step leave unexplained, also where every weight is right.

A probe that misses a reduction shows on no correct run: what other ranks brought is measured all the same. It shows
when the run is wrong, as a finding that can name no event. So correct runs are asked whether their records account for
every weight.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.account import Gap, account
from gradcheck_dist.diagnosis.cells import SIGMAS, Cell
from gradcheck_dist.diagnosis.culprit import kind_of
from gradcheck_dist.diagnosis.step_verdict import StepVerdict

LEAST = 1e-2


def unexplained(verdict: StepVerdict) -> list[str]:
    """Each kind of change that was measured and not recorded, in words; empty where the records explain everything."""
    place = verdict.contributions.coordinate
    found: dict[str, int] = {}
    for held in verdict.held:
        for cell in held.cells:
            story = account(verdict.data, held, cell)
            told = [_words(gap) for gap in story.gaps if _loud(gap, cell)]
            if story.by_hand and place.get(held.rank) != cell.key[0]:
                told.append("what other ranks brought came by no recorded reduction")
            for words in told:
                found[words] = found.get(words, 0) + 1
    return [f"{words} ({count} weights)" for words, count in found.items()]


def _loud(gap: Gap, cell: Cell) -> bool:
    return abs(gap.factor - 1) > max(LEAST, 2 * cell.tolerance, SIGMAS * gap.noise)


def _words(gap: Gap) -> str:
    start, end = (kind_of(event) if event is not None else "the loss" for event in (gap.start, gap.end))
    return f"x {gap.factor:.3g} between {start} and {end} by nothing recorded"
