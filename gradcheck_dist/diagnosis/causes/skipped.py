"""Gradients that a loop which reduces others leaves out: what it does to those besides, these lack as well."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.tracks import ParamKey


def without_skipped(cases: list[Case], judged: Sequence[Held]) -> list[Case]:
    """The same without what is off in gradients that lack a reduction anyway, where nothing was done to them between
    the loss and the optimizer, and others of the same contributions, which were reduced, come out right: one loop over
    parameters reduces and divides, and left these out."""
    lacking = {(held.param, rank) for case in cases if case.culprit.absent for held in case.held for rank in held.ranks}
    if not lacking or len(cases) < 2:
        return cases
    reduced = _reduced(cases[0], judged)
    besides = [case for case in cases if not case.culprit.absent and _is_skipped(case, lacking, reduced)]
    for case in cases:
        if case.culprit.absent and (of := next((one for one in besides if _concerns(one, case)), None)) is not None:
            case.skipped = 1 / of.pattern.factor if of.pattern.kind == "uniform" and of.pattern.factor else None
            case.whole = [(held, cell) for held in case.held for cell in held.cells]
    return [case for case in cases if not any(case is one for one in besides)]


def _reduced(case: Case, judged: Sequence[Held]) -> set[tuple[int, ContributionKey]]:
    """Of each rank the contributions of its own that are right in a gradient to which others' came as well."""
    place = case.context.contributions.coordinate
    found: set[tuple[int, ContributionKey]] = set()
    for held in judged:
        right = {cell.key for cell in held.cells if cell.right}
        if any(key[0] != place.get(held.rank) for key in right):
            found |= {(held.rank, key) for key in right}
    return found


def _is_skipped(case: Case, lacking: set[tuple[ParamKey, int]], reduced: set[tuple[int, ContributionKey]]) -> bool:
    if any((held.param, held.rank) not in lacking for held in case.held):
        return False
    wrong = {(id(held), cell.key) for held, cell in case.cells if not cell.right}
    cells = [(held, cell) for held in case.held for cell in held.cells if (id(held), cell.key) in wrong]
    untouched = all(abs(cell.ratio - cell.root_ratio) <= 2 * cell.margin for _, cell in cells)
    return bool(cells) and untouched and all((held.rank, cell.key) in reduced for held, cell in cells)


def _concerns(one: Case, other: Case) -> bool:
    return not {(held.param, held.rank) for held in one.held}.isdisjoint((held.param, held.rank) for held in other.held)
