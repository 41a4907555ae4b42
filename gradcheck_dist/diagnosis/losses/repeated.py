"""Losses that several passes of a step differentiate, with all of these gradients kept in `.grad`.

A running total that goes backward after every microbatch, or one call with `retain_graph` too many: tokens enter the
step once and its gradient several times. Passes that were only looked at or whose gradients were emptied, and those
that train parameters of their own (`backward(inputs=...)`), repeat nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from gradcheck_dist.diagnosis.losses.returned import weighing
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions, losses_of_rank
from gradcheck_dist.ledger.tracks import ParamKey, StepData

ALIKE = 1e-6
"""Gradients whose cosine is nearer to 1 than this are told apart by nothing."""
GONE = 1e-2
"""A share of a gradient, relative, that is as good as none."""


@dataclass(frozen=True)
class Repeats:
    """Of each pass, how many tokens enter the step with it (None: not known), and in how many passes those go that do.
    `entered` tells of a pass with none where the first of its losses did; `again` are the passes that differentiate a
    loss again, for `params`."""

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

    def filled(self, expected: dict[ContributionKey, Fraction]) -> dict[ContributionKey, Fraction]:
        """What a pass that brings no tokens weighs is what these weighed where they entered."""
        return expected | {key: expected[first] for key, first in self.entered.items() if first in expected}


def repeats(data: StepData, contributions: Contributions, measured: Sequence[Held]) -> Repeats | None:
    """The losses of a step that are differentiated again; None where none is."""
    losses = _passes_of_losses(data, contributions)
    if all(len(passes) < 2 for passes in losses):
        return None
    new: dict[ContributionKey, int | None] = defaultdict(int)
    times: dict[ContributionKey, int] = defaultdict(int)
    entered: dict[ContributionKey, ContributionKey] = {}
    params: set[ParamKey] = set()
    for passes in losses:
        first = next(iter(passes))
        shared = {key: _keeping(measured, first, key) for key in passes if key != first}
        again = [key for key, keeping in shared.items() if keeping]
        for key, count in passes.items():
            if key not in again:
                so_far = new[key]
                new[key] = None if count is None or so_far is None else so_far + count
        times[first] = max(times[first], 1 + len(again))
        entered |= {key: first for key in again if key not in entered}
        params = params.union(*shared.values())
    if not params:
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
    for passes in _passes_of_losses(data, contributions):
        for key in passes:
            kept[key].append(any(other in weighs for other in passes))
    return {key for key in gone if kept[key] and all(kept[key])}


def weighing_or_gone(measured: Sequence[Held]) -> tuple[set[ContributionKey], set[ContributionKey]]:
    """Contributions of which something may be in some gradient, and those of which nothing is in any."""
    telling = [held for held in measured if held.observed is not None and np.isfinite(held.observed).any()]
    weighs, seen = weighing(telling)  # a gradient of zeros tells nothing of any pass
    return weighs, seen - weighs


def _passes_of_losses(data: StepData, contributions: Contributions) -> list[dict[ContributionKey, int | None]]:
    """For each loss its passes in order, and how many of its tokens each has."""
    found: dict[tuple[int, int], dict[ContributionKey, int | None]] = defaultdict(dict)
    for rank in sorted({one.loss_rank for one in contributions.by_key.values() if one.loss_rank is not None}):
        pairs = [(slot, entry) for slot, of in losses_of_rank(data.events[rank]).items() for entry, _ in of]
        for slot, entry in sorted(pairs, key=lambda pair: pair[1].seq):
            key = (contributions.coordinate.get(rank, rank), *slot)
            if key in contributions.by_key:
                found[rank, entry.loss_id][key] = entry.num_tokens
    return list(found.values())


def _keeping(measured: Sequence[Held], first: ContributionKey, other: ContributionKey) -> set[ParamKey]:
    """The parameters whose gradient holds what both passes brought."""
    return {held.param for held in measured if _keeps(held, first, other)}


def _keeps(held: Held, first: ContributionKey, other: ContributionKey) -> bool:
    keys = held.replay.basis.keys
    columns = [[column for column, key in enumerate(keys) if key == one] for one in (first, other)]
    if not all(columns) or held.observed is None or held.nominal is None:
        return False
    if not all(np.any(held.nominal[of] != 0) for of in columns):
        return False  # one was emptied before the other came
    both = [*columns[0], *columns[1]]
    leaves = np.nan_to_num(held.replay.basis.values[both])
    brought = [leaves[: len(columns[0])].sum(axis=0), leaves[len(columns[0]) :].sum(axis=0)]
    sizes = [float(np.linalg.norm(one)) for one in brought]
    if not all(sizes):
        return False  # zeros tell nothing
    if abs(float(brought[0] @ brought[1])) < (1 - ALIKE) * sizes[0] * sizes[1]:
        largest = float(np.nanmax(np.abs(held.observed)))
        return all(np.abs(held.observed[of]).max() > GONE * largest for of in columns)
    # Which of them is there nobody can tell, but how much of both.
    found, documented = held.observed[both] @ leaves, held.nominal[both] @ leaves
    return bool(np.linalg.norm(found - documented) <= GONE * np.linalg.norm(documented))
