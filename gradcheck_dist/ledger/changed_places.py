"""Gradients that changed places: each of some parameters has, but for a factor, what another one of them had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gradcheck_dist.events import Event
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track

LEAST = 8
"""Elements that are not zero: fewer may point the same way by chance, or by a symmetry of the model."""


@dataclass(frozen=True)
class ChangedPlaces:
    """Whose gradient each parameter of a rank has at `event`, and had not at the event `before`, which may be the same
    backward pass."""

    rank: int
    before: Event | None
    event: Event
    has: Mapping[ParamKey, ParamKey]


@dataclass(frozen=True)
class _Pair:
    """What was sampled of one parameter at two events, one behind the other: the first's number, and unit vectors."""

    since: int
    before: np.ndarray
    now: np.ndarray
    epsilon: float


def changed_places(data: StepData) -> Iterator[ChangedPlaces]:
    """Sampled positions go by shape, so that gradients of equal shape can be compared. Only what changes places among
    themselves is told: a gradient that is copied to another model's parameters is meant there."""
    for rank in sorted(data.events):
        looked_at: dict[tuple[int, tuple[int, ...]], dict[ParamKey, _Pair]] = defaultdict(dict)
        for key, of_rank in data.tracks.items():
            if (track := of_rank.get(rank)) is not None:
                for seq, pair in _pairs(track):
                    looked_at[seq, tuple(track.param.shape)].setdefault(key, pair)
        found: dict[int, dict[ParamKey, tuple[ParamKey, int]]] = defaultdict(dict)
        for (seq, _), of_shape in sorted(looked_at.items()):
            found[seq] |= {key: (owner, of_shape[key].since) for key, owner in _among_themselves(of_shape).items()}
        for seq, has in found.items():
            if has and (event := data.event_of[rank].get(seq)) is not None:
                before = data.event_of[rank].get(max(since for _, since in has.values()))
                yield ChangedPlaces(rank, before, event, {key: owner for key, (owner, _) in has.items()})


def _pairs(track: Track) -> Iterator[tuple[int, _Pair]]:
    """By the number of each event at which a parameter's gradient was sampled: this and the sample before. In front of
    the first stands what the first pass alone brought."""
    if not track.points:
        return
    brought = [leaf for leaf in track.leaves.values() if leaf[0] <= track.points[0].seq]
    # What torch.autograd.grad returns is in .grad when the next pass is over.
    brought = [leaf for leaf in brought if leaf[0] < track.points[0].seq] or brought
    samples = [(seq, leaf.data) for seq, leaf in brought[:1] if len(brought) == 1]
    for earlier, later in pairwise([*samples, *((point.seq, point.values.data) for point in track.points)]):
        if (before := _unit(earlier[1])) is not None and (now := _unit(later[1])) is not None:
            yield later[0], _Pair(earlier[0], before, now, EPSILON[track.dtype])


def _unit(values: np.ndarray) -> np.ndarray | None:
    """The direction of what is held, shape (num_positions,); None where that is too little to tell."""
    whole: np.ndarray = np.nan_to_num(values.astype(np.float64))
    length = float(np.linalg.norm(whole))
    return whole / length if np.count_nonzero(whole) >= LEAST and 0 < length < np.inf else None


def _among_themselves(of_shape: Mapping[ParamKey, _Pair]) -> dict[ParamKey, ParamKey]:
    keys, pairs = list(of_shape), list(of_shape.values())
    if len(keys) < 2:
        return {}
    alike = _alike(pairs)
    has: dict[ParamKey, ParamKey] = {}
    for index, key in enumerate(keys):
        owners = np.flatnonzero(alike[index])
        if len(owners) == 1 and owners[0] != index:
            has[key] = keys[owners[0]]
    while astray := [key for key, owner in has.items() if owner not in has]:
        for key in astray:
            del has[key]
    return has if len(set(has.values())) == len(has) else {}


def _alike(pairs: Sequence[_Pair]) -> np.ndarray:
    """Whether what each holds now, a row, has the direction of what each held before, a column. Rounding of elements
    turns a vector by its epsilon at most."""
    now, before = np.stack([pair.now for pair in pairs]), np.stack([pair.before for pair in pairs])
    near = max(max(pair.epsilon for pair in pairs) ** 2, 1e-11)
    return np.asarray(np.abs(now @ before.T) >= 1 - near)
