"""What ranks of one batch exchange though all of them hold it alike: tokens that nobody parted before their experts."""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.audits.exchanges import BY_VERIFY, are_parts
from gradcheck_dist.diagnosis.audits.whole_shares import UNDOES
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.ledger.combined_copies import swapped_copies
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.exchanges import Passed
from gradcheck_dist.ledger.tracks import StepData


def counted_for_each_copy(data: StepData, contributions: Contributions) -> list[str]:
    """Why a step is left open whose weights are right."""
    reasons = (
        f"{_words(one)}: x {len(one.ranks)}, unless each rank exchanges its own part, or a line divides: {BY_VERIFY}"
        for one in _of_one_batch(data, contributions)
    )
    return list(dict.fromkeys(reasons))


def copies_are_made_up_for(case: Case, data: StepData) -> str | None:
    """Why a factor accuses nobody: it is what makes up for the copies, on parameters of which each rank has its own."""
    if case.pattern.kind != "uniform":
        return None
    near = max(UNDOES, case.pattern.tolerance)
    for one in _of_one_batch(data, case.context.contributions):
        undoes = abs(case.pattern.factor * len(one.ranks) - 1) <= near
        if undoes and all(are_parts(data.tracks[held.param], one.ranks) for held in case.held):
            return f"{_words(one)}; x {case.pattern.factor:.6g} makes up for that: {BY_VERIFY}"
    return None


def _of_one_batch(data: StepData, contributions: Contributions) -> Iterator[Passed]:
    for one in swapped_copies(data.events):
        if len({contributions.coordinate.get(rank, rank) for rank in one.ranks}) == 1:
            yield one


def _words(one: Passed) -> str:
    first = one.first
    where = first.site.short if first.site is not None else "line unknown"
    return (
        f"{first.function or first.collectives[0]} ({where}) exchanges what all {len(one.ranks)} ranks hold alike, and "
        "the gradient of each copy comes back whole, so that what is used behind it (experts) sees each token, and "
        f"its gradient, {len(one.ranks)} times"
    )
