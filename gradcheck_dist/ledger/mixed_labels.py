"""Losses of one pass that compare the same logits, and share out one weight: one loss with mixed labels.

    loss = lam * cross_entropy(logits, labels) + (1 - lam) * cross_entropy(logits, labels[index])

Mixup and CutMix draw `lam` anew in each pass, so that each half's weight is of the data, and both together are that of
the pass. Taken one by one, the same tokens would count twice, with two weights. That halves are no main loss with an
auxiliary one is seen where their coefficients come to 1, or where these are drawn anew and come to one number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import msgspec

from gradcheck_dist.events import Event, Loss, LossGradient
from gradcheck_dist.ledger.contributions import losses_of_rank
from gradcheck_dist.ledger.tracks import StepData

SAME = 1e-3
APART = 1e-2
"""Shares of one weight that are drawn anew lie further apart."""
OF_SUM = ("weight_min", "weight_max", "multipliers", "divisors", "sum_before", "part_of", "logits")
OF_SAMPLES = ("num_samples", "sample_weight", "sample_spread", "shortest_sample", "longest_sample")
ALONE = dict.fromkeys((*OF_SUM, *OF_SAMPLES))
"""Fields of a LossGradient that tell of one loss of a sum."""

Counted = tuple[LossGradient, Loss | None]
Mixture = Sequence[Counted]


@dataclass(frozen=True)
class MixedLabels:
    """A step whose losses with mixed labels are one in each pass. `num`: how many of them one adds up at most.
    `certain`: they surely share out one weight; else they are so where weights come out right so."""

    data: StepData
    num: int
    line: str
    certain: bool

    @property
    def remark(self) -> str:
        return (
            f"{self.num} losses of one pass compare the same logits ({self.line}), each with labels of its own, and "
            "share out one weight (mixup, CutMix): taken for one loss with mixed labels"
        )


def mixed_labels(data: StepData) -> MixedLabels | None:
    """The same step with the losses of each pass that compare the same logits as one loss. None where passes add up no
    such losses, or such as count other numbers of labels."""
    found = {rank: [one for pairs in losses_of_rank(of_rank).values() for one in _on_same_logits(pairs)]
             for rank, of_rank in data.events.items()}  # fmt: skip
    mixtures = [one for of_rank in found.values() for one in of_rank]
    if not mixtures or not all(map(_is_mixture, mixtures)):
        return None
    events = {rank: _as_one(of_rank, found[rank]) for rank, of_rank in data.events.items()}
    first = mixtures[0][0][1]
    line = first.site.short if first is not None and first.site is not None else "an unknown line"
    certain = all(map(_come_to_one, mixtures)) or _drawn_anew(mixtures)
    return MixedLabels(replace(data, events=events), max(map(len, mixtures)), line, certain)


def _on_same_logits(pairs: Sequence[Counted]) -> list[Mixture]:
    """The losses of a pass that compare the same logits, several together, in the order of forward."""
    groups: dict[int, list[Counted]] = defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: pair[0].loss_id):
        if pair[0].logits is not None:
            groups[pair[0].logits].append(pair)
    return list(groups.values())


def _is_mixture(pairs: Mixture) -> bool:
    """Whether losses are of one kind and count as many labels, each of which weighs as much in all of them together."""
    if any(loss is None or one.computed or one.weight < 0 for one, loss in pairs):
        return False
    losses = [loss for _, loss in pairs if loss is not None]
    kinds = {(loss.op, loss.reduction, loss.num_labels) for loss in losses}
    counts = {one.num_tokens for one, _ in pairs if one.weight}  # of coefficients per label, 0 leaves none
    alike = len(kinds) == 1 and len(counts) == 1
    return alike and _is_one_number([loss.num_weighted_tokens or 0.0 for loss in losses]) and _are_complements(pairs)


def _are_complements(pairs: Mixture) -> bool:
    """Whether what two losses weigh apart from label to label makes one number of each."""
    lows = [one.weight if one.weight_min is None else one.weight_min for one, _ in pairs]
    highs = [one.weight if one.weight_max is None else one.weight_max for one, _ in pairs]
    if _is_one_number([*lows, *highs]) or all(map(_is_one_number, zip(lows, highs, strict=True))):
        return True
    return len(pairs) == 2 and _is_one_number([_total(pairs), lows[0] + highs[1], highs[0] + lows[1]])


def _come_to_one(pairs: Mixture) -> bool:
    """Whether the numbers before the losses come to 1 in the sum that the pass is a multiple of, or those that multiply
    them do, where they are divided alike."""
    whole, count = pairs[0][0].whole, _count(pairs)
    if whole and any(_is_one_number([_total(pairs) * num / whole, 1.0]) for num in (1, count)):
        return True
    numbers = [_products(one) for one, _ in pairs]
    known = [one for one in numbers if one is not None]
    alike = len(known) == len(numbers) and _is_one_number([divided for _, divided in known])
    return alike and _is_one_number([sum(multiplied for multiplied, _ in known), 1.0])


def _products(one: LossGradient) -> tuple[float, float] | None:
    """What multiplies a loss in its sum, and what divides it there."""
    multipliers = [value for value in one.multipliers or () if value is not None]
    divisors = [value for value in one.divisors or () if value is not None]
    known = len(multipliers) == len(one.multipliers or ()) and len(divisors) == len(one.divisors or ())
    return (prod(multipliers), prod(divisors)) if known and one.multipliers is not None else None


def _drawn_anew(mixtures: Sequence[Mixture]) -> bool:
    """Whether each loss's share is another one in other passes, and all of them come to one number in every pass, for
    each label or for all labels of the pass."""
    shares = [pairs[0][0].weight / _total(pairs) for pairs in mixtures]
    if max(shares) - min(shares) <= APART:
        return False
    totals = [_total(pairs) for pairs in mixtures]
    counted = [_total(pairs) * _count(pairs) for pairs in mixtures]
    return _is_one_number(totals) or _is_one_number(counted)


def _total(pairs: Mixture) -> float:
    return sum(one.weight for one, _ in pairs)


def _count(pairs: Mixture) -> int:
    return max(one.num_tokens or 0 for one, _ in pairs)


def _is_one_number(values: Iterable[float]) -> bool:
    low, *_, high = sorted(values)
    return high - low <= SAME * abs(high)


def _as_one(events: list[Event], mixtures: Sequence[Mixture]) -> list[Event]:
    """The events of a rank with one loss of each mixture, the first that counts labels, in the place of all of them."""
    told: dict[int, LossGradient] = {}
    dropped: set[int] = set()
    for pairs in mixtures:
        kept = next(one for one, _ in pairs if one.num_tokens == _count(pairs))
        whole = kept.whole if kept.other_losses else None
        told[kept.seq] = msgspec.structs.replace(kept, weight=_total(pairs), whole=whole, **ALONE)
        dropped.update(one.loss_id for one, _ in pairs if one is not kept)
    return [
        told[event.seq] if isinstance(event, LossGradient) and event.seq in told else event
        for event in events
        if not (isinstance(event, Loss | LossGradient) and event.loss_id in dropped)
    ]
