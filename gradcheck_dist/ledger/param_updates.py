"""What optimizers made of parameters whose gradients nobody reduced, beside others that were reduced.

Parameters that ranks hold alike, that get unlike gradients, and that are alike behind the step all the same have been
moved by something that the optimizer combined over ranks in its step. Where they are unlike behind it, and alike again
when the next one begins, a line averaged them, or sent one rank's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.events import ParamUpdate, Reduce, Replica
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track

CHANCE = 1e-3
"""How probable it may be that signs of unlike gradients alone move copies alike."""


@dataclass(frozen=True)
class Update:
    """A few values of one parameter on one rank as its optimizers' steps began and as they left it, float32 of shape
    (count,)."""

    begun: np.ndarray
    left: np.ndarray


def updates_of(events: Iterable[object]) -> dict[int, Update]:
    """Of a rank's events of one step, by parameter id. Of several optimizers the first began and the last one left."""
    found: dict[int, Update] = {}
    for event in events:
        if isinstance(event, ParamUpdate):
            for param, begun, left in in_two_rows(event):
                first = found.get(param, Update(begun, left)).begun
                found[param] = Update(first if first.shape == left.shape else begun, left)
    return found


def in_two_rows(event: ParamUpdate | Replica) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Of each parameter its id, the values of the first row and those of the second; nothing where there are none."""
    if not event.values:
        return
    first, second = np.frombuffer(event.values, dtype="<f4").reshape(2, -1)
    cuts = np.cumsum(event.counts)[:-1]
    yield from zip(event.params, np.split(first, cuts), np.split(second, cuts), strict=True)


def updates_by_param(data: StepData) -> dict[ParamKey, dict[int, Update]]:
    """Of parameters of which ranks hold as many elements each, and that were looked at on all of these: by rank. Shards
    of unequal sizes are no copies."""
    of_ranks = {rank: updates_of(events) for rank, events in data.events.items()}
    found: dict[ParamKey, dict[int, Update]] = {}
    for key, tracks in data.tracks.items():
        mine = {rank: of_ranks[rank].get(track.param.id) for rank, track in tracks.items()}
        seen = {rank: one for rank, one in mine.items() if one is not None}
        if len(seen) == len(tracks) > 1 and len({one.begun.shape for one in seen.values()}) == 1:
            found[key] = seen
    return found


def moved_alike(data: StepData, keys: Collection[ParamKey]) -> bool:
    """Whether what steps moved these parameters alike on all ranks that hold them, though it reads unlike gradients,
    which nobody reduced. Those of many that were not looked at go by the others. What moves by the sign of its gradient
    alone, as in Adam's first step, is alike where signs are, which chance explains."""
    updates = updates_by_param(data)
    seen = {key: updates[key] for key in keys if key in updates}
    if not seen or not all(map(are_alike, seen.values())) or any(_is_reduced(data, key) for key in keys):
        return False
    num_moved = sum(num_moved_of(of_ranks) for of_ranks in seen.values())
    num_alike, total = map(sum, zip(*(_signs(data.tracks[key]) for key in seen), (0, 0), strict=True))
    return num_moved > 0 and ((num_alike + 1) / (total + 1)) ** num_moved <= CHANCE


def all_moved_alike(data: StepData) -> frozenset[ParamKey]:
    """All parameters that something combined over ranks moved, though nobody reduced their gradients."""
    alike = [key for key, of_ranks in updates_by_param(data).items() if are_alike(of_ranks) and num_moved_of(of_ranks)]
    keys = frozenset(key for key in alike if not _is_reduced(data, key))
    return keys if moved_alike(data, keys) else frozenset()


def are_alike(of_ranks: Mapping[int, Update]) -> bool:
    """Whether ranks held one parameter alike before and behind a step."""
    first, *others = of_ranks.values()
    return all(np.array_equal(first.begun, one.begun) and np.array_equal(first.left, one.left) for one in others)


def num_moved_of(of_ranks: Mapping[int, Update]) -> int:
    """How many of its values that were looked at a step moved, on the rank where these are the most."""
    return max(int(np.count_nonzero(one.left != one.begun)) for one in of_ranks.values())


def is_averaged(of_steps: Sequence[Mapping[int, Update]]) -> bool:
    """Whether a parameter is alike on all ranks when a step begins, though the one before had left it unlike, at least
    once, and never as one rank alone had left it: that one's is sent then, and the others' gradients are lost."""
    begun = [np.stack([one.begun for one in of_ranks.values()]) for of_ranks in of_steps]
    left = [np.stack([one.left for one in of_ranks.values()]) for of_ranks in of_steps]
    in_turn = ((before, after) for before, after in zip(left, begun[1:], strict=False) if before.shape == after.shape)
    unlike = [(before, after) for before, after in in_turn if not _is_one(before)]
    sent = any(_is_one(after) and (before == after[0]).all(axis=1).any() for before, after in unlike)
    return not sent and any(_is_one(after) for _, after in unlike)


def _is_one(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _signs(tracks: Mapping[int, Track]) -> tuple[int, int]:
    """Of how many elements all ranks read gradients of one sign, and of how many there are any."""
    read = [track.points[-1].values.data for track in tracks.values() if track.points]
    if len(read) < len(tracks) or len({one.shape for one in read}) > 1:
        return 0, 0
    signs = np.sign(np.nan_to_num(np.stack(read)))
    there = signs.any(axis=0)
    return int((signs == signs[0]).all(axis=0)[there].sum()), int(there.sum())


def _is_reduced(data: StepData, key: ParamKey) -> bool:
    return any(
        isinstance(event, Reduce) and track.param.id in data.params_of(rank, event.params)
        for rank, track in data.tracks[key].items()
        for event in data.events[rank]
    )
