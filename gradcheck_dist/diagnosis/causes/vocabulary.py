"""The words of the search for causes: rows of weights, edits of hands, explanations and their rivals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import log2, prod
from typing import NamedTuple

from gradcheck_dist.diagnosis.causes.account import Account, Hand
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.context import EXCHANGE_GROUPS, RANKS_PER_BATCH, RANKS_PER_EXCHANGE
from gradcheck_dist.diagnosis.weights.factors import SPAN

CAUSE = 1.0
LOSS = 1.0
OTHER = 1.5
OTHER_GAP = 0.9
"""A number that somebody divides by on a line of their own is wrong sooner than one inside of a recorded hand, and than
the loss's."""
OTHER_AVERAGE = 2.0
"""A line that divides by just the ranks that a reduction adds up is right, unless the losses' number is odder."""
MISSING = 1.25
CLIPPED = 0.25
"""What may be a clip that no probe saw: a nameless factor below 1 on all weights, just before the optimizer."""
DIVIDES_TOO = 0.4
"""What a clip's lines cost more that divide by something besides, as a sum of ranks' gradients is averaged."""
NAMELESS = 4.0
"""The cost of a number that no product of degrees and counts equals, where it is known well."""
BITS = 3.5
"""Bits to the unit of cost: which of a dozen degrees and counts, or their reciprocals, a number is."""
ALIKE = 1.1
"""Explanations whose costs differ by less are both told, where another size would tell them apart: one cause more, or
one more name."""
TIE = 0.5
"""Explanations whose costs differ by less are equally good: half a name."""
MOST_RIVALS = 2
MOST_REFERENCES = 4
MOST_EDITS = 3
COARSE = 0.02
"""A number that is known worse than this is not named."""
GAP = "gap"
"""Kind of a hand that nobody recorded: it is meant, or it should not have acted."""
LOSSES: Hand = ("loss",)
LOSS_SCALE = 8
"""A power of two from this exponent on may be a loss scale."""
EXACTLY = 1e-6
"""A divisor that lies so near to a power of two, in its exponent, was written as one and not measured."""
RANKS = frozenset(
    {"data_ranks", "dp_replicate", "dp_shard", "cp", "tp", "ep", "world_size"}
    | {RANKS_PER_BATCH, RANKS_PER_EXCHANGE, EXCHANGE_GROUPS}
)
PASSES = "accumulation_steps"
CLIP_COEFFICIENT = "clip_coefficient"
SCHEDULE = frozenset({"microbatches", PASSES})
TOKENS = "num_tokens"


class Edit(NamedTuple):
    """What a hand should have done instead. `mode` is never, once, missing, elsewhere or clipped; `reference` is what a
    missing hand does to others, what an unrecorded one does elsewhere, or what it does besides a clip."""

    hand: Hand
    mode: str
    reference: float = 1.0


Powers = Mapping[str, int]
"""Which degrees and counts a factor is made of, and to which power."""


def is_scale(value: float, near: float) -> bool:
    """Whether a number is a power of two as loss scales are, but for `near` in the exponent."""
    exponent = log2(value) if value > 0 else 0.0
    return round(exponent) >= LOSS_SCALE and abs(exponent - round(exponent)) <= near


def is_power_of_two(divisor: float) -> bool:
    return abs(log2(divisor) - round(log2(divisor))) <= EXACTLY


def is_scaling(hand: Hand) -> bool:
    """Whether a hand multiplies by a constant of its own that could be another one."""
    return hand[0] in ("Reduce", "ScaleGrads", "AmpUnscale", GAP)


def is_one_count(powers: Powers) -> bool:
    """Whether a product of degrees and counts takes no more to say than a loss scale: each of them once, and of tokens
    only what they are divided by."""
    times = any(name != TOKENS and power > 0 for name, power in powers.items())
    return all(abs(power) == 1 for power in powers.values()) and not (TOKENS in powers and times)


def add(total: dict[str, int], powers: Powers, times: int) -> None:
    for name, power in powers.items():
        total[name] = total.get(name, 0) + times * power


def divides(powers: Powers, averaged: Set[str]) -> bool:
    """Whether somebody divides by such a product: by degrees and counts, each once, or by tokens over what an average
    divides them by."""
    over = {name for name, power in powers.items() if power != 1}
    return not over or (powers.get(TOKENS) == 1 and over <= averaged and all(powers[name] == -1 for name in over))


def over_averaged(powers: Powers, averaged: Set[str]) -> Set[str]:
    """What a product of the step's tokens divides by that an average divides by as well: with these the tokens are one
    number, the N/R that a sum loss has to be divided by there."""
    over = {name for name in averaged if powers.get(name) == -1}
    return over if powers.get(TOKENS) == 1 else set()


def cost_of_name(powers: Powers, averaged: Set[str]) -> float:
    """What it takes to say a constant of the losses: its degrees and counts, one by one, but N/R is one."""
    if over := over_averaged(powers, averaged):
        others = [abs(power) for name, power in powers.items() if name not in {TOKENS, *over}]
        return 1.5 + sum(others) + 0.5 * len(others)
    return sum(abs(power) for power in powers.values()) + 0.5 * (len(powers) - 1)


def same(first: list[Powers], second: list[Powers]) -> bool:
    """Whether two explanations give the same formula for every weight: then no other size tells them apart."""
    return all(dict(one) == dict(other) for one, other in zip(first, second, strict=True))


@dataclass(frozen=True)
class Row:
    """Weights to which the same was done: the account of one of them, its documented ratio and how far that may be
    off, relative; `exact` is what rounding alone allows of what is recorded. `gaps` are hands that nobody recorded,
    with the factors that were measured; they are in `documented` as well. `carried_by` is that of them which brought
    the contribution here from another rank."""

    account: Account
    documented: float
    allowed: float
    exact: float
    gaps: tuple[tuple[Hand, float], ...] = ()
    carried_by: Hand | None = None

    @cached_property
    def factors(self) -> dict[Hand, list[float]]:
        """What each hand did, time after time."""
        found = {hand: list(factors) for hand, factors in self.account.factors.items()}
        for hand, factor in self.gaps:
            found.setdefault(hand, []).append(factor)
        return found


@dataclass(frozen=True)
class Explanation:
    """`edits` with their hands; `loss` is the factor by which all losses are off, None when they are right; `others`
    are hands that multiply by this factor too much each time a weight meets them."""

    edits: tuple[Edit, ...] = ()
    loss: float | None = None
    others: tuple[tuple[Hand, float], ...] = ()
    cost: float = 0.0

    @property
    def gaps(self) -> frozenset[Hand]:
        """The hands to blame that nobody recorded."""
        return frozenset(hand for hand in self.hands if hand[0] == GAP)

    @property
    def hands(self) -> frozenset[Hand]:
        return frozenset([edit.hand for edit in self.edits] + [hand for hand, _ in self.others])

    @property
    def causes(self) -> frozenset[Hand]:
        """The hands to blame, and the losses where they are."""
        return self.hands | ({LOSSES} if self.loss is not None else frozenset())


@dataclass(frozen=True)
class Rival:
    """Another explanation that fits, in words, and what the factors of both are made of where they differ."""

    words: str
    powers: tuple[tuple[str, int], ...]
    against: tuple[tuple[str, int], ...]


def ends_step(hand: Hand) -> bool:
    """Whether an unrecorded hand acted just before the clip or the optimizer."""
    identity = hand[3]
    return isinstance(identity, tuple) and bool({"OptimizerStep", "Clip"} & set(map(str, identity)))


def follows_norm(hand: Hand) -> bool:
    """Whether an unrecorded hand begins where the norm of gradients was taken: by a clip's own lines."""
    return hand[0] == GAP and hand[1] == "gradient_norm"


def divided_too(hand: Hand, rows: Sequence[Row], quantities: Mapping[str, float]) -> Iterator[Edit]:
    """A clip that divides besides, as ranks' sums are averaged: its own number is not known, so it may hold another.
    Tokens are divided by what a reduction averages over, and by the passes that losses were divided by."""
    numbers = {value for value in quantities.values() if value > 1}
    ranks, passes = ({1.0, *(quantities[name] for name in names & quantities.keys())} for names in (RANKS, SCHEDULE))
    numbers |= {quantities.get(TOKENS, 1.0) / (size * count) for size in ranks for count in passes}
    most = (1 - SAME) / max(prod(row.factors[hand]) for row in rows)
    yield from (Edit(hand, "clipped", 1 / number) for number in sorted(numbers) if 1 < number < most)


def needed(hand: Hand, rows: Sequence[Row]) -> float | None:
    """The one number that a hand should have multiplied all weights by, where it took another one on each rank."""
    met = [row for row in rows if hand in row.factors and row.documented]
    values = [prod(row.factors[hand]) / row.documented for row in met]
    alike = all(abs(value / values[0] - 1) <= 2 * row.allowed for value, row in zip(values, met, strict=True))
    return values[0] if values and alike and values[0] > 0 else None


def nameless(tolerance: float) -> float:
    """The cost of a number without a name: what is known roughly takes few digits to write down."""
    return min(NAMELESS, max(log2(SPAN / (2 * tolerance)) / BITS, 1.0))


def effect(did: Mapping[Hand, list[float]], edit: Edit) -> float:
    """By what the edited hand put a weight off."""
    hand, mode, reference = edit
    factors = did.get(hand, [])
    if mode in ("elsewhere", "clipped"):
        return prod(factors) / reference if factors else 1.0
    if mode == "missing":
        # Who went through another event of this kind does not miss this one.
        return 1.0 if any(other[0] == hand[0] for other in did) else 1.0 / reference
    return prod(factors if mode == "never" else factors[1:])


def choices(edits: Sequence[Edit]) -> Iterator[tuple[Edit, ...]]:
    """Sets of edits of different hands, the smallest first."""
    yield ()
    for count in range(1, MOST_EDITS + 1):
        for chosen in combinations(edits, count):
            if len({edit.hand for edit in chosen}) == count:
                yield chosen
