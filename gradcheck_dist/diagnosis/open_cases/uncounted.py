"""Weights of a step in which not all losses count tokens: what each of them should be is not known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import GONE, Cell, Held
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions

HeldCell = tuple[Held, Cell]


def without_uncounted(
    cases: list[Case], recorded: Contributions, counted: Contributions, judged: Iterable[Held]
) -> list[Case]:
    """The cases without those that rest on a count that nobody knows.

    Where one rank or pass has a loss that counts no tokens (mean squared error on one data set, cross-entropy on the
    other), a mean over all of them has another divisor than the tokens that were seen. What a contribution weighs in
    most parameters and on most ranks may be just the weight that it should have, whatever that is.

    Args:
        recorded: the contributions as losses tell them; `counted`: as the step is judged.
    """
    known = {key for key, one in counted.by_key.items() if one.num_tokens is not None}
    all_count = all(one.num_tokens is not None or key in known for key, one in recorded.by_key.items())
    if not cases or not known or all_count:
        return cases
    cells: dict[ContributionKey, list[HeldCell]] = defaultdict(list)
    for held in judged:
        for cell in held.cells:
            cells[cell.key].append((held, cell))
    common = {key: _commonest(of_key) for key, of_key in cells.items()}
    return [case for case in cases if not (_is_common(case, common) or _is_all_of_a_loss(case, cells))]


def _commonest(cells: Sequence[HeldCell]) -> list[HeldCell]:
    """Of one contribution's weights those that agree with the one which most agree with, itself the first."""
    best = max((cell for _, cell in cells), key=lambda one: (sum(_agree(one, cell) for _, cell in cells), -one.margin))
    found = [(held, cell) for held, cell in cells if _agree(cell, best)]
    return sorted(found, key=lambda pair: pair[1] is not best)


def _is_common(case: Case, common: dict[ContributionKey, list[HeldCell]]) -> bool:
    """Whether a case is of all common weights of some contributions, and has no share but theirs, or is a share of
    these alone."""
    wrong = [(held, cell) for held, cell in case.cells if not cell.right]
    mine = {(held.param, held.rank, cell.key) for held, cell in wrong}
    theirs = {(held.param, held.rank, key) for key in {key for *_, key in mine} for held, _ in common[key]}
    if not theirs <= mine or not all(common[key] for *_, key in mine):
        return False
    return mine == theirs or all(_agree(cell, common[cell.key][0][1]) for _, cell in wrong)


def _is_all_of_a_loss(case: Case, cells: Mapping[ContributionKey, list[HeldCell]]) -> bool:
    """Whether a case is what some losses weigh in all that they reach, whatever else befell parts of it."""
    if case.culprit.kind != "loss" or case.culprit.unrecorded:
        return False
    mine = {(held.param, held.rank, cell.key) for held, cell in case.cells}
    there = {(held.param, held.rank, key) for *_, key in mine for held, cell in cells[key] if abs(cell.ratio) > GONE}
    return there <= mine


def _agree(one: Cell, other: Cell) -> bool:
    return abs(other.ratio) > GONE and abs(one.ratio - other.ratio) <= one.margin + other.margin
