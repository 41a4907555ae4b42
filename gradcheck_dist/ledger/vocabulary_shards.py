"""Cross-entropies over shards of the vocabulary, held against the logits of all shards.

A label's loss and logit tell the logsumexp n over all classes to the rank that holds the label, and each rank knows
that of its own shard, z_r. So what the ranks recorded of one label (probes/losses/loss_backward.py) has to agree: the
shares exp(z_r - n) of softmax sum to 1, and the rank of another shard gives its logits that share of what arrives. A
maximum or a denominator that is not shared, or is averaged, is one wrong number on all ranks: no weight and no loss
differs, and backward is the derivative of what forward gave, or of what it should have given. It shows here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.events import Event, LossBackward
from gradcheck_dist.ledger.loss_backwards import (
    FITS,
    MIN_LABELS,
    OTHER,
    OTHERWISE,
    OwnBackward,
    tolerance_of,
    tolerance_of_loss,
    values_of,
)

OFF = 0.02
"""By so much softmax has to sum to something else than 1 in some label: a smaller difference may be a term that is
added to the loss inside of its function (a z-loss)."""

FAR = 50.0
"""Logarithm of the largest share that is told from a larger one."""

ARRIVED, GIVEN, REST, GAP, OWN, WHOLE, LABEL = 0, 1, 2, 3, 5, 6, 7
"""Columns of what was seen of a label."""


@dataclass(frozen=True)
class Shards:
    """One application of a function on all ranks that hold a shard, `events` by rank. Of the labels that count:
    `sums`, what softmax sums to over the shards as the losses have it; `given` and `owed`, (labels, ranks), the share
    of what arrives that a rank of another shard gave to its logits and owes them (NaN for the rank that holds the
    label). `allowed` is the tolerance of each label's sum; `derives`: the rank that holds a label gave it the
    derivative. `arrived`: the lowest and the highest gradient that arrived."""

    events: dict[int, LossBackward]
    sums: np.ndarray
    given: np.ndarray
    owed: np.ndarray
    allowed: np.ndarray
    derives: bool
    arrived: tuple[float, float]

    @property
    def first(self) -> LossBackward:
        return self.events[min(self.events)]

    @property
    def sums_to_one(self) -> bool:
        """Whether these losses are cross-entropies over all shards."""
        return bool((np.abs(self.sums - 1) <= self.allowed).all())

    @property
    def sums_to_another(self) -> bool:
        """Whether losses, and what was given for them, are a softmax's that does not sum to 1 over its classes.

        A loss with a term of its own inside is no such thing: its derivative is another than softmax's by the same
        normaliser (smoothed labels), or the term alone pushes all sums one way (a z-loss), against what is given.
        """
        off = np.abs(self.sums - 1) > np.maximum(OFF, self.allowed)
        if not self.derives or off.sum() < MIN_LABELS:
            return False
        if self.gives_what_it_owes(self.owed):
            return True
        above = self.sums > 1 + np.maximum(OFF, self.allowed)
        by_gradient = np.nansum(self.given, 1) + self.sums - np.nansum(self.owed, 1)
        return bool(above.any()) and bool((np.abs(by_gradient - 1) <= self.allowed).all())

    def gives_what_it_owes(self, owed: np.ndarray) -> bool:
        away = np.abs(self.given - owed) > self.allowed[:, None] * np.maximum(owed, FITS)
        return not bool((away & ~np.isnan(owed)).any())


def shards_of_vocabularies(events: Mapping[int, list[Event]]) -> Iterator[Shards]:
    """The applications of a step in which every rank of a group was seen with the same labels."""
    found: dict[tuple[object, ...], dict[int, list[LossBackward]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in events.items():
        for event in of_rank:
            if isinstance(event, LossBackward) and rank in event.group:
                key = (event.function, event.group, event.accumulation_step, event.microbatch)
                found[key][rank].append(event)
    for (_, group, *_), by_rank in found.items():
        if set(by_rank) != set(group) or len({len(of_rank) for of_rank in by_rank.values()}) > 1:  # type: ignore[call-overload]
            continue
        for alike in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True):
            if (one := _together(dict(zip(sorted(by_rank), alike, strict=True)))) is not None:
                yield one


def unlike_shards(events: Mapping[int, list[Event]], known: Sequence[OwnBackward]) -> Iterator[OwnBackward]:
    """Functions whose losses are cross-entropies over all shards, and whose backward gives what they do not owe, beside
    those that one rank's labels tell already."""
    told = {one.first.function for one in known}
    for one in shards_of_vocabularies(events):
        if one.first.function in told or not one.sums_to_one:
            continue
        away = np.abs(one.given - one.owed) / np.maximum(np.maximum(one.given, one.owed), FITS)
        other = (away > OTHERWISE) & (one.owed > FITS)
        if (other.sum(0) < MIN_LABELS).all():
            continue
        told.add(one.first.function)
        for place, (rank, event) in enumerate(one.events.items()):
            if other[:, place].sum() >= MIN_LABELS:
                rest = float(np.median(away[other[:, place], place]))
                yield OwnBackward(rank, OTHER, (event,), one.arrived, tolerance_of(event), rest=rest)


def _together(events: dict[int, LossBackward]) -> Shards | None:
    """One application, where its ranks looked at the same labels and each lies in one shard."""
    read = [values_of(event) for event in events.values()]
    if len({values.shape for values in read}) > 1:
        return None
    values = np.stack(read, 1)  # (labels, ranks, columns)
    values = values[~np.isnan(values[:, :, GAP]).any(1)]
    values = values[np.isfinite(values[:, :, : OWN + 1]).all((1, 2)) & (values[:, :, ARRIVED] != 0).all(1)]
    here = ~np.isnan(values[:, :, WHOLE])
    arrived = values[:, :, ARRIVED]
    alike = (values[:, :, LABEL] == values[:, :1, LABEL]).all() and (here.sum(1) == 1).all()
    if len(values) < MIN_LABELS or not alike or (np.ptp(arrived, 1) > FITS * np.abs(arrived).max(1)).any():
        return None
    tolerance = max(map(tolerance_of, events.values()))
    whole = np.nansum(values[:, :, WHOLE], 1)
    of_loss = max(map(tolerance_of_loss, events.values()))
    multiple = values[:, :, GIVEN] / arrived
    shares = np.exp(np.minimum(values[:, :, OWN] - whole[:, None], FAR))
    derives = (values[:, :, REST] <= tolerance).all() and (np.abs(multiple[here] - 1) <= tolerance).all()
    return Shards(
        events=events,
        sums=shares.sum(1),
        given=np.where(here, np.nan, multiple),
        owed=np.where(here, np.nan, shares),
        allowed=tolerance + of_loss * (1 + np.abs(whole)),
        derives=bool(derives),
        arrived=(float(arrived.min()), float(arrived.max())),
    )
