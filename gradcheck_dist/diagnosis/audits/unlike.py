"""Tensors of one name whose gradients are reduced together, though they are not copies of one parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np

from gradcheck_dist.events import GATHERED, SHARDING, Event, Reduce
from gradcheck_dist.ledger.names import plain_name
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track, merge

APART = 0.5
"""Relative difference from which two tensors' values are unlike: copies that drifted differ by far less, and two draws
of one distribution by about 1.4."""

_SHARDED = {"fsdp", "hsdp", "replicate", GATHERED}


@dataclass(frozen=True)
class Unlike:
    """A parameter, a reduction of its gradient on `rank`, and the ranks of its group by the values that they hold, or
    by the parts that their modules say they are (`declared`). `shards`: another reduction leaves each a shard of one
    tensor."""

    param: ParamKey
    rank: int
    event: Reduce
    holders: tuple[tuple[int, ...], ...]
    declared: bool = False
    shards: bool = False


@dataclass(frozen=True)
class Mixed:
    """What was reduced together in a step. `alike` are the parameters of which all ranks of a group hold one value;
    `concerned` are the ranks of all groups that hold what is unlike. `sharded_beside`: a wrapper makes shards of other
    parameters over some of these ranks, whose values do not tell whether they are of one model."""

    unlike: list[Unlike]
    alike: list[ParamKey]
    coordinate: dict[int, int]
    concerned: tuple[int, ...] = ()
    sharded_beside: bool = False

    @property
    def tells(self) -> bool:
        """Whether any values that were compared could be told apart."""
        return bool(self.unlike or self.alike)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold what is unlike, of each parameter's largest group."""
        return tuple(sorted({rank for one in self.unlike for part in one.holders for rank in part}))

    @cached_property
    def began_apart(self) -> bool:
        """Whether the whole model differs between data ranks that reduce it, which is no layout but another start."""
        return (
            bool(self.unlike)
            and not self.alike
            and not self.sharded_beside
            and all(
                not (one.declared or one.shards)
                and all(len(ranks) == 1 for ranks in one.holders)
                and len({self.coordinate.get(rank, rank) for (rank,) in one.holders}) == len(one.holders)
                for one in self.unlike
            )
        )


def mixed(data: StepData, coordinate: Mapping[int, int]) -> Mixed:
    """Which reductions of a step join tensors that are no copies of one another, and which join copies. `coordinate`:
    which data rank a rank is."""
    unlike: dict[ParamKey, Unlike] = {}
    alike: list[ParamKey] = []
    concerned: set[int] = set()
    for key, of_rank in data.tracks.items():
        for rank, event, group in reductions_of(data, key, of_rank):
            holders = _holders(data, {peer: of_rank[peer] for peer in group}, event)
            if holders is None:
                continue
            if len(holders) == 1:
                alike.append(key)
                continue
            concerned.update(group)
            if key not in unlike or len(group) > len(unlike[key].event.group):
                unlike[key] = Unlike(key, rank, event, holders, shards=_are_shards(data, of_rank[rank], event))
    for one in _declared(data):
        unlike.setdefault(one.param, one)
        concerned.update(rank for part in one.holders for rank in part)
    apart = [key for key in alike if key not in unlike]
    beside = any(
        key not in unlike and _are_shards(data, track, one.event)
        for one in unlike.values()
        for key, of_rank in data.tracks.items()
        if (track := of_rank.get(one.rank)) is not None
    )
    return Mixed(list(unlike.values()), apart, dict(coordinate), tuple(sorted(concerned)), beside)


def _are_shards(data: StepData, track: Track, event: Reduce) -> bool:
    """Whether a wrapper leaves ranks of this group a shard each of this parameter's gradient."""
    return any(
        isinstance(other, Reduce)
        and other.impl in SHARDING - {"replicate"}
        and len(set(other.group) & set(event.group)) > 1
        and track.param.id in data.params_of(track.rank, other.params)
        for other in data.events[track.rank]
    )


def _declared(data: StepData) -> Iterator[Unlike]:
    """Reductions over ranks that each hold a part of their own, as modules say of what began as zeros."""
    parts: dict[ParamKey, dict[ParamKey, dict[int, Track]]] = defaultdict(dict)
    for (stage, name), of_rank in data.tracks.items():
        if plain_name(name) != name and all(track.param.partitioned for track in of_rank.values()):
            parts[stage, plain_name(name)][stage, name] = of_rank
    for family in parts.values():
        for key, of_rank in family.items():
            for rank, track in sorted(of_rank.items()):
                for event in data.events[rank]:
                    if not isinstance(event, Reduce) or track.param.id not in data.params_of(rank, event.params):
                        continue
                    group = set[int]().union(*_groups(event))
                    holders = tuple(
                        tuple(sorted(group & set(one))) for one in family.values() if not group.isdisjoint(one)
                    )
                    if len(holders) > 1:
                        yield Unlike(key, rank, event, holders, declared=True)


def reductions_of(
    data: StepData, key: ParamKey, of_rank: dict[int, Track]
) -> Iterator[tuple[int, Reduce, tuple[int, ...]]]:
    """The reductions of a parameter over ranks that each hold a tensor of this name, every group once."""
    known: set[tuple[int, ...]] = set()
    for rank, track in sorted(of_rank.items()) if len(of_rank) > 1 else ():
        for event in data.events[rank]:
            if not isinstance(event, Reduce) or track.param.id not in data.params_of(rank, event.params):
                continue
            for group in _groups(event):
                held = tuple(sorted(peer for peer in group if peer in of_rank))
                if len(held) > 1 and held not in known:
                    known.add(held)
                    yield rank, event, held


def _groups(event: Reduce) -> tuple[tuple[int, ...], ...]:
    """The ranks that are to hold what this one holds: under sharding the replicas of its shard; those of both groups
    that a communication hook reduces over."""
    if event.impl in _SHARDED:
        return (event.replicate_group,) if event.all_reduced else ()
    return () if event.impl == "reduce_scatter" else (event.group, event.replicate_group)


def _holders(data: StepData, tracks: dict[int, Track], event: Reduce) -> tuple[tuple[int, ...], ...] | None:
    """The ranks by the values that they hold, or by the elements that they reduce; None where the values do not tell,
    or where some are neither alike nor unlike at both ends of the step."""
    together = []
    reduced = {rank: _reduced(data, track, event) for rank, track in tracks.items()}
    for one, other in combinations(tracks, 2):
        mine, theirs = reduced[one], reduced[other]
        if mine.any() and theirs.any() and not (mine & theirs).any():
            continue  # shards of one tensor
        told = {
            _same(mine, theirs)
            for mine, theirs in ((tracks[one].begun, tracks[other].begun), (tracks[one].left, tracks[other].left))
            if mine is not None and theirs is not None
        }
        if len(told) != 1 or None in told:
            return None
        if told == {True}:
            together.append({one, other})
    return tuple(sorted(tuple(sorted(part)) for part in merge([{rank} for rank in tracks], together)))


def _reduced(data: StepData, track: Track, event: Reduce) -> np.ndarray:
    """Which elements a rank holds of a gradient where it takes part in such a reduction, shape (num_positions,); none
    where that was not sampled, or where a reduction may leave each rank a part."""
    alike = {
        one.seq
        for one in (data.events[track.rank] if event.impl == "all_reduce" else ())
        if isinstance(one, Reduce) and (one.impl, one.group) == (event.impl, event.group)
        if track.param.id in data.params_of(track.rank, one.params)
    }
    points = [point.values.data for point in track.points if point.seq in alike]
    return ~np.isnan(points[-1]) if points else np.zeros(1, dtype=bool)


def _same(mine: np.ndarray, theirs: np.ndarray) -> bool | None:
    """Whether two tensors hold the same values; None where they hold one number each, as zeros and ones do."""
    if len(mine) != len(theirs):
        return False
    if not (np.isfinite(mine).all() and np.isfinite(theirs).all()):
        return None
    if np.ptp(mine) == 0 and np.ptp(theirs) == 0:
        return None
    size = max(float(np.linalg.norm(mine)), float(np.linalg.norm(theirs)))
    return float(np.linalg.norm(mine - theirs)) <= APART * size


def first_of(unlike: list[Unlike]) -> tuple[int, Event]:
    """The earliest of the reductions on the first rank that has one: (rank, event)."""
    one = min(unlike, key=lambda one: (one.rank, one.event.seq))
    return one.rank, one.event
