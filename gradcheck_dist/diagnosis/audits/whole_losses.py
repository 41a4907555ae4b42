"""Data ranks that all compute one whole loss, on features that they exchanged where no probe saw it.

Features may be gathered as bytes (pickled, as DPR does), by messages, or through another library. Equal labels and
equal values of the losses in every pass then tell that ranks have one loss, and unequal gradients of copies that each
got its own share of that loss's gradient. The shares have to be summed, so an average over R ranks leaves 1/R.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp

from msgspec.structs import replace

from gradcheck_dist.diagnosis.audits.exchanges import BY_VERIFY, are_parts
from gradcheck_dist.diagnosis.audits.whole_shares import UNDOES
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Exchange, Loss, RootValue
from gradcheck_dist.ledger.contributions import Contributions, losses_of_rank
from gradcheck_dist.ledger.strangers import strangers
from gradcheck_dist.ledger.tracks import StepData

SAME = 1e-6
"""Relative difference of two values within which they are of one loss, computed from the same numbers."""
EVEN = 1e-5
"""Relative distance of exp(loss) from a whole number within which it may be the loss of scores that are all equal,
which ranks with other features have in common."""


@dataclass(frozen=True)
class WholeLoss:
    """One loss of a step that all of so many data ranks compute. `where`: its line."""

    num_ranks: int
    where: str

    @property
    def words(self) -> str:
        share = 1 / self.num_ranks
        return (
            f"all {self.num_ranks} ranks compute one loss ({self.where}: equal labels and values, from features that "
            "they exchanged where no probe saw it) and unequal gradients of it: where each has its own share alone, "
            f"an average over the ranks leaves x {share:.6g} of its gradient"
        )


def whole_loss(data: StepData, contributions: Contributions) -> WholeLoss | None:
    """The loss that all ranks of a step compute whole though each has a gradient of its own; None where ranks have
    losses of their own, or an exchange was recorded, which tells more."""
    ranks = sorted(data.events)
    if any(isinstance(event, Exchange) for events in data.events.values() for event in events):
        return None
    whole = _one_loss(data, contributions)
    apart = strangers(data) if whole is not None else {}
    return None if any(apart.get(rank) != frozenset(ranks) for rank in ranks) else whole


def _one_loss(data: StepData, contributions: Contributions) -> WholeLoss | None:
    """The loss that all ranks of a step compute, each of which counts its tokens for a batch of its own."""
    ranks = sorted(data.events)
    if len(ranks) < 2 or len({contributions.coordinate.get(rank, rank) for rank in ranks}) < len(ranks):
        return None
    first, *others = (_losses(data, rank) for rank in ranks)
    if not first or not all(map(_tells, first.values())) or any(other.keys() != first.keys() for other in others):
        return None
    if not all(_is_one(loss, other[slot]) for other in others for slot, loss in first.items()):
        return None
    site = next(iter(first.values())).site
    return WholeLoss(len(ranks), site.short if site is not None else "line unknown")


def shares_of_one_loss(data: StepData, contributions: Contributions) -> list[str]:
    """Why a step is left open whose weights are right as if each rank had a loss of its own."""
    whole = whole_loss(data, contributions)
    return [] if whole is None else [f"{whole.words}. Add gradients up, or multiply the loss by the ranks: {BY_VERIFY}"]


def share_is_made_up_for(case: Case, data: StepData) -> str | None:
    """Why a factor accuses nobody: losses that weigh as many times more as there are ranks with shares of them."""
    if case.pattern.kind != "uniform":
        return None
    whole = whole_loss(data, case.context.contributions)
    if whole is None or abs(case.pattern.factor / whole.num_ranks - 1) > max(UNDOES, case.pattern.tolerance):
        return None
    return f"{whole.words}; what enters at the loss makes up for that: {BY_VERIFY}"


def part_of_one_loss(case: Case, data: StepData) -> str | None:
    """Why a factor accuses nobody: parts of a classifier whose classes are on all ranks get the gradient of the one
    loss whole, and its tokens, for which every rank stands that reduces others' gradients with these, count once."""
    if case.pattern.kind != "uniform":
        return None
    whole = _one_loss(data, case.context.contributions)
    if whole is None or abs(case.pattern.factor / whole.num_ranks - 1) > max(UNDOES, case.pattern.tolerance):
        return None
    if not all(are_parts(data.tracks[held.param], tuple(data.events)) for held in case.held):
        return None
    names = in_short(sorted({held.param[1] for held in case.held}))
    return (
        f"all {whole.num_ranks} ranks compute one loss ({whole.where}: equal labels and values), whose tokens count "
        f"once for each of them beside gradients that they reduce, and the gradients of {names} differ: x "
        f"{whole.num_ranks} is right for parts that each rank holds alone, and for shares of a gradient that an "
        f"average over the ranks follows. Other shares are x {1 / whole.num_ranks:.6g} then, unless something "
        f"multiplies them on the way (the backward of a gather): {BY_VERIFY}"
    )


def _losses(data: StepData, rank: int) -> Mapping[tuple[tuple[int, int], int], Loss]:
    """A rank's own losses by pass, and by their place in it; empty where one is not known. One that has no value, a
    function of somebody's own, has that which its pass begins at."""
    pairs = losses_of_rank(data.events[rank]).items()
    found = {(slot, place): loss for slot, of_pass in pairs for place, (_, loss) in enumerate(of_pass)}
    for root in (event for event in data.events[rank] if isinstance(event, RootValue)):
        loss = found.get(((root.accumulation_step, root.microbatch), 0))
        if loss is not None and loss.value is None:
            found[(root.accumulation_step, root.microbatch), 0] = replace(loss, value=root.value)
    return {key: loss for key, loss in found.items() if loss is not None} if None not in found.values() else {}


def _tells(loss: Loss) -> bool:
    """Whether equal labels and values of two losses tell that they are one."""
    if loss.label_hash is None or not loss.value or (loss.num_tokens or loss.num_labels or 0) < 2:
        return False
    each = loss.value / (loss.num_tokens or 1) if loss.reduction == "sum" else loss.value
    return 0 < each < 50 and abs(exp(each) / max(round(exp(each)), 1) - 1) > EVEN


def _is_one(mine: Loss, theirs: Loss) -> bool:
    if mine.label_hash != theirs.label_hash or mine.value is None or theirs.value is None:
        return False
    return abs(mine.value - theirs.value) <= SAME * max(abs(mine.value), abs(theirs.value))
