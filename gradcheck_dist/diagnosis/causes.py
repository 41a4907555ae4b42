"""The words of the search for causes: rows of weights, edits of hands, explanations and their rivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from gradcheck_dist.diagnosis.account import Account, Hand

CAUSE = 1.0
LOSS = 1.0
OTHER = 1.5
OTHER_GAP = 0.9
"""A number that somebody divides by on a line of their own is wrong sooner than one inside of a recorded hand, and than
the loss's."""
MISSING = 1.25
NAMELESS = 4.0
"""The cost of a number that no product of degrees and counts equals."""
ALIKE = 1.1
"""Explanations whose costs differ by less are both told, where another size would tell them apart: one cause more, or
one more name."""
TIE = 0.5
"""Explanations whose costs differ by less are equally good: half a name."""
MOST_RIVALS = 2
MOST_EDITS = 3
COARSE = 0.02
"""A number that is known worse than this is not named."""
GAP = "gap"
"""Kind of a hand that nobody recorded: it is meant, or it should not have acted."""
LOSS_SCALE = 8
"""A power of two from this exponent on may be a loss scale."""
RANKS = frozenset({"data_ranks", "dp_replicate", "dp_shard", "cp", "tp", "ep", "world_size"})
SCHEDULE = frozenset({"microbatches", "accumulation_steps"})

Edit = tuple[Hand, str]
"""(hand, "never" | "once" | "missing" | "elsewhere")"""


Powers = Mapping[str, int]
"""Which degrees and counts a factor is made of, and to which power."""


def add(total: dict[str, int], powers: Powers, times: int) -> None:
    for name, power in powers.items():
        total[name] = total.get(name, 0) + times * power


def same(first: list[Powers], second: list[Powers]) -> bool:
    """Whether two explanations give the same formula for every weight: then no other size tells them apart."""
    return all(dict(one) == dict(other) for one, other in zip(first, second, strict=True))


@dataclass(frozen=True)
class Row:
    """Weights to which the same was done: the account of one of them, its documented ratio and how far that may be
    off, relative; `exact` is what rounding alone allows. `gaps` are hands that nobody recorded, with the factors that
    were measured; they are in `documented` as well."""

    account: Account
    documented: float
    allowed: float
    exact: float
    gaps: tuple[tuple[Hand, float], ...] = ()

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
    are hands that multiply by this factor too much each time a weight meets them. `names` is the part of `cost` that
    the names of numbers make up."""

    edits: tuple[Edit, ...] = ()
    loss: float | None = None
    others: tuple[tuple[Hand, float], ...] = ()
    cost: float = 0.0
    names: float = 0.0

    @property
    def gaps(self) -> frozenset[Hand]:
        """The hands to blame that nobody recorded."""
        return frozenset(hand for hand in self.hands if hand[0] == GAP)

    @property
    def hands(self) -> frozenset[Hand]:
        return frozenset([hand for hand, _ in self.edits] + [hand for hand, _ in self.others])


@dataclass(frozen=True)
class Rival:
    """Another explanation that fits, in words, and what the factors of both are made of where they differ."""

    words: str
    powers: tuple[tuple[str, int], ...]
    against: tuple[tuple[str, int], ...]


def effect(did: Mapping[Hand, list[float]], edit: Edit, factor: float = 1.0) -> float:
    """By what the edited hand put a weight off; `factor` is what a missing hand does to others."""
    hand, mode = edit
    factors = did.get(hand, [])
    if mode == "elsewhere":
        return prod(factors) / factor if factors else 1.0
    if mode == "missing":
        # Who went through another event of this kind does not miss this one.
        return 1.0 if any(other[0] == hand[0] for other in did) else 1.0 / factor
    return prod(factors if mode == "never" else factors[1:])
