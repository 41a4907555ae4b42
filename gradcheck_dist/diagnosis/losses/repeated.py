"""Losses that several passes of a step differentiate, with all of these gradients kept in `.grad`.

A running total that goes backward after every microbatch, or one call with `retain_graph` too many: tokens enter the
step once and its gradient several times. Passes that were only looked at or whose gradients were emptied, and those
that train parameters of their own (`backward(inputs=...)`), repeat nothing. Nor do passes that each take other elements
of one loss that was not reduced (a gradient for each sample), as long as their gradients differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

import numpy as np

from gradcheck_dist.diagnosis.losses.returned import weighing
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.written import scales_by_hand
from gradcheck_dist.events import GradWrite, Loss
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions, losses_of_rank
from gradcheck_dist.ledger.tracks import ParamKey, StepData

ALIKE = 1e-6
"""Gradients whose cosine is nearer to 1 than this are told apart by nothing."""
MOST_PARTS = 10**6
"""A share of a weight is taken for a fraction of no larger denominator."""
GONE = 1e-2
"""A share of a gradient, relative, that is as good as none."""


@dataclass(frozen=True)
class Repeats:
    """Of each pass, how many tokens enter the step with it (None: not known), and in how many passes those go that do.
    `entered` tells of a pass with none where the first of its losses did; `again` are the passes that differentiate a
    loss again, for `params`: for none where all that they brought was emptied."""

    new: dict[ContributionKey, int | None]
    times: dict[ContributionKey, int]
    entered: dict[ContributionKey, ContributionKey]
    again: frozenset[ContributionKey]
    params: frozenset[ParamKey]

    def counted_once(self, contributions: Contributions) -> Contributions:
        """The contributions with the tokens that enter with each."""
        by_key = {
            key: replace(one, num_tokens=self.new.get(key, one.num_tokens), samples=None)
            for key, one in contributions.by_key.items()
        }
        return replace(contributions, by_key=by_key)

    def shared_out(
        self, contributions: Contributions, expected: Mapping[ContributionKey, Fraction]
    ) -> dict[ContributionKey, Fraction]:
        """What passes weigh that share out the weight of the loss which they differentiate, each as its own weight at
        the loss tells: halves that go backward one after the other. As `expected` where these are not known."""
        of_loss: dict[ContributionKey, list[ContributionKey]] = defaultdict(list)
        for key, first in self.entered.items():
            of_loss[first].append(key)
        shares = dict(expected)
        for first, others in of_loss.items():
            keys = [first, *others]
            weights = [contributions.by_key[key].weight or 0.0 for key in keys if key in expected]
            if len(weights) < len(keys) or min(weights) <= 0:
                return dict(expected)
            for key, weight in zip(keys, weights, strict=True):
                shares[key] = expected[first] * Fraction(weight / sum(weights)).limit_denominator(MOST_PARTS)
        return shares


def repeats(data: StepData, contributions: Contributions, measured: Sequence[Held]) -> Repeats | None:
    """The losses of a step that are differentiated again; None where none is."""
    losses = _passes_of_losses(data, contributions)
    if all(len(passes) < 2 for passes, _ in losses):
        return None
    new: dict[ContributionKey, int | None] = defaultdict(int)
    times: dict[ContributionKey, int] = defaultdict(int)
    entered: dict[ContributionKey, ContributionKey] = {}
    params: set[ParamKey] = set()
    _, gone = weighing_or_gone(measured)
    several = {key for passes, _ in losses if len(passes) > 1 for key in passes}
    beside = _Beside(frozenset(contributions.by_key) - several, data)
    for passes, in_parts in losses:
        same = _of_one_part(measured, list(passes)) if in_parts else None
        again: dict[ContributionKey, ContributionKey] = {}
        lost: dict[ContributionKey, ContributionKey] = {}
        firsts: dict[ContributionKey, int] = {}
        for index, (key, count) in enumerate(passes.items()):
            first = next((one for one, at in firsts.items() if same is None or same[at, index]), None)
            shared = _keeping(measured, first, key, beside) if first is not None else set()
            if first is not None and shared:
                again[key] = first
                params |= shared
                continue
            if first is not None and {first, key} <= gone:
                lost[key] = first
                continue
            firsts[key] = index
            so_far = new[key]
            new[key] = None if count is None or so_far is None else so_far + count
        for first in firsts if in_parts else list(firsts)[:1]:
            times[first] = max(times[first], 1 + list(again.values()).count(first))
        entered = again | lost | entered
    if not entered:
        return None
    return Repeats(
        {key: new[key] for key in contributions.by_key},
        {key: count for key, count in times.items() if new[key] != 0},
        {key: first for key, first in entered.items() if new[key] == 0},
        frozenset(entered),
        frozenset(params),
    )


def replaced(data: StepData, contributions: Contributions, measured: Sequence[Held]) -> set[ContributionKey]:
    """Passes of which nothing is in any gradient and each of whose losses was differentiated again in a pass of which
    something is: their gradients were looked at and emptied, maybe by a line that nobody records."""
    weighs, gone = weighing_or_gone(measured)
    kept: dict[ContributionKey, list[bool]] = defaultdict(list)
    for passes, in_parts in _passes_of_losses(data, contributions):
        same = _of_one_part(measured, list(passes)) if in_parts and not weighs.isdisjoint(passes) else None
        for index, key in enumerate(passes):
            again = [other for at, other in enumerate(passes) if same is None or same[at, index]]
            kept[key].append(not weighs.isdisjoint(again))
    return {key for key in gone if kept[key] and all(kept[key])}


def weighing_or_gone(measured: Sequence[Held]) -> tuple[set[ContributionKey], set[ContributionKey]]:
    """Contributions of which something may be in some gradient, and those of which nothing is in any."""
    telling = [held for held in measured if held.observed is not None and np.isfinite(held.observed).any()]
    weighs, seen = weighing(telling)  # a gradient of zeros tells nothing of any pass
    return weighs, seen - weighs


def _passes_of_losses(
    data: StepData, contributions: Contributions
) -> list[tuple[dict[ContributionKey, int | None], bool]]:
    """For each loss its passes in order, and how many of its tokens each has; and whether these may be others in each,
    since none has all of them."""
    found: dict[tuple[int, int], dict[ContributionKey, int | None]] = defaultdict(dict)
    whole: dict[tuple[int, int], int | None] = {}
    for rank in sorted({one.loss_rank for one in contributions.by_key.values() if one.loss_rank is not None}):
        pairs = [(slot, entry) for slot, of in losses_of_rank(data.events[rank]).items() for entry, _ in of]
        losses = {event.loss_id: event for event in data.events[rank] if isinstance(event, Loss)}
        for slot, entry in sorted(pairs, key=lambda pair: pair[1].seq):
            key = (contributions.coordinate.get(rank, rank), *slot)
            if key in contributions.by_key:
                found[rank, entry.loss_id][key] = entry.num_tokens
                loss = losses.get(entry.loss_id)
                unreduced = loss is not None and loss.reduction == "none"
                whole[rank, entry.loss_id] = (loss.num_tokens or loss.num_labels) if loss and unreduced else None
    return [(passes, _in_parts(passes, whole[of])) for of, passes in found.items()]


def _in_parts(passes: Mapping[ContributionKey, int | None], num_tokens: int | None) -> bool:
    return num_tokens is not None and all(count is not None and count < num_tokens for count in passes.values())


def _of_one_part(measured: Sequence[Held], passes: Sequence[ContributionKey]) -> np.ndarray:
    """Which of the passes that may take other elements of a loss took the same ones, shape (passes, passes): all of
    their gradients are parallel."""
    alike = np.ones((len(passes), len(passes)), dtype=bool)
    told = ~alike
    for held in measured:
        rows = np.stack([_brought(held, key) for key in passes])
        sizes = np.linalg.norm(rows, axis=1)
        units = rows / np.where(sizes, sizes, 1.0)[:, None]
        both = np.outer(sizes > 0, sizes > 0)
        alike &= ~both | (np.abs(units @ units.T) >= 1 - ALIKE)
        told |= both
    return np.asarray(alike & told)


def _brought(held: Held, key: ContributionKey) -> np.ndarray:
    """The sampled elements of what a pass brought to a parameter, in all columns together."""
    columns = [column for column, own in enumerate(held.replay.basis.keys) if own == key]
    return np.asarray(np.nan_to_num(held.replay.basis.values[columns]).sum(axis=0))


@dataclass(frozen=True)
class _Beside:
    """What may have become of two gradients together: what became of the passes that differentiate losses of their own
    alone, or, where there are none, what lines of the trainer's own are seen to multiply gradients by."""

    alone: frozenset[ContributionKey]
    data: StepData

    def by_hand(self, held: Held) -> set[float]:
        """By what the trainer's lines multiply a parameter's gradient: nothing, a loss scale, all of them together."""
        track = self.data.tracks[held.param].get(held.rank)
        factors = [
            event.factor
            for event in self.data.events.get(held.rank, ())
            if isinstance(event, GradWrite)
            and event.factor
            and track is not None
            and track.param.id in self.data.params_of(held.rank, event.params)
        ]
        return {1.0, *(1 / scale for scale in scales_by_hand(self.data)), prod(factors)}


def _keeping(
    measured: Sequence[Held], first: ContributionKey, other: ContributionKey, beside: _Beside
) -> set[ParamKey]:
    """The parameters whose gradient holds what both passes brought."""
    return {held.param for held in measured if _keeps(held, first, other, beside)}


def _keeps(held: Held, first: ContributionKey, other: ContributionKey, beside: _Beside) -> bool:
    keys = held.replay.basis.keys
    columns = [[column for column, key in enumerate(keys) if key == one] for one in (first, other)]
    if not all(columns) or held.observed is None or held.nominal is None:
        return False
    if not all(np.any(held.nominal[of] != 0) for of in columns):
        return False  # one was emptied before the other came
    one, two = _brought(held, first), _brought(held, other)
    sizes = float(np.linalg.norm(one)), float(np.linalg.norm(two))
    if not all(sizes):
        return False  # zeros tell nothing
    if abs(float(one @ two)) < (1 - ALIKE) * sizes[0] * sizes[1]:
        largest = float(np.nanmax(np.abs(held.observed)))
        return all(np.abs(held.observed[of]).max() > GONE * largest for of in columns)
    # Which of them is there nobody can tell, but how much of both.
    both = [*columns[0], *columns[1]]
    leaves = np.nan_to_num(held.replay.basis.values[both])
    found, documented = held.observed[both] @ leaves, held.nominal[both] @ leaves
    others = [column for column, key in enumerate(keys) if key in beside.alone and held.nominal[column]]
    ratios = [ratio for ratio in held.observed[others] / held.nominal[others] if abs(ratio) > 0]
    shares = {float(np.median(ratios))} if ratios else beside.by_hand(held)
    return any(
        np.linalg.norm(found - documented * share) <= GONE * np.linalg.norm(documented * share) for share in shares
    )
