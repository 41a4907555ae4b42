"""Ranks that train apart: they reduce no gradients between them, and average their parameters now and then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from gradcheck_dist.events import (
    EXCHANGES_PROBE,
    LATER_MODELS,
    Exchange,
    OptimizerStep,
    PipelineStep,
    ProbeStatus,
    Reduce,
    Replica,
)
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.moved import as_on_rank
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track, merge
from gradcheck_dist.trace.run import Run


@dataclass(frozen=True)
class Averaged:
    """What tells that parameters were made alike: by which step or so, between which ranks. `alike`: they were equal
    afterwards; else they were only changed by something that is no optimizer."""

    step: int
    num_steps_later: int
    alike: bool

    @property
    def words(self) -> str:
        when = f"step {self.step + self.num_steps_later}"
        if self.alike:
            return f"their parameters, which had become unequal, are equal again after {when}"
        return f"something that is no optimizer changes their parameters on every rank after {when}"


def averaged(run: Run) -> Averaged | None:
    """Whether ranks' parameters were unequal and became equal again, or were changed on all of them by something else
    than an optimizer, and not by each rank alone (a weight decay or a clip of weights by hand, behind which no
    collective stands); None where nothing of the kind was seen. Parameters that the optimizer left as they were, and
    that are unequal afterwards, are not averaged: what is gathered into them are shards, which it moved in their
    place."""
    seen = {rank: _states(run, rank) for rank in run.ranks}
    common = set.intersection(*map(set, seen.values())) if len(seen) > 1 else set()
    unequal = False
    changed: Averaged | None = None
    for moment in sorted(common):
        left = {of_rank[moment][0] for of_rank in seen.values()}
        found = {of_rank[moment][1] for of_rank in seen.values()}
        unequal |= len(left - {None}) > 1
        if unequal and len(found) == 1:
            return Averaged(*moment, alike=True)
        alone = all(of_rank[moment][2] is False for of_rank in seen.values())
        alone |= len(found) > 1 and all(of_rank[moment][3] for of_rank in seen.values())
        if changed is None and not alone and all(of_rank[moment][0] not in (None, of_rank[moment][1])
                                                 for of_rank in seen.values()):  # fmt: skip
            changed = Averaged(*moment, alike=False)
        unequal |= len(found) > 1
    return changed


def trained_later(run: Run) -> dict[int, list[str]]:
    """By rank, in words, the models that were trained behind the recorded steps, in none of which ranks reduced
    anything."""
    statuses = {rank: [e for e in trace.events if isinstance(e, ProbeStatus)] for rank, trace in run.ranks.items()}
    return {rank: [e.reason for e in of_rank if e.probe == LATER_MODELS] for rank, of_rank in statuses.items()}


@dataclass(frozen=True)
class Drifted:
    """`ranks` were updated alike in step `before`, and hold other values than one another when `behind` begins."""

    before: int
    behind: int
    ranks: tuple[int, ...]


def drifted_between(run: Run, steps: Sequence[int]) -> Drifted | None:
    """The first steps between which ranks drifted apart where nothing was recorded; None where they did not."""
    seen = {rank: _ends(run, rank) for rank in sorted(run.ranks)}
    for before, behind in pairwise(sorted(steps)):
        if behind == before + 1:
            continue
        alike: dict[tuple[int | None, ...], list[int]] = defaultdict(list)
        for rank, ends in seen.items():
            begun, left = ends.get((before, False)), ends.get((before, True))
            if None not in (begun, left, ends.get((behind, False))) and begun != left:
                alike[begun, left].append(rank)
        for ranks in alike.values():
            if len({seen[rank][behind, False] for rank in ranks}) > 1:
                return Drifted(before, behind, tuple(ranks))
    return None


def _ends(run: Run, rank: int) -> dict[tuple[int, bool], int]:
    """The checksum when a step began, and the last one when an optimizer had stepped in it (True)."""
    found: dict[tuple[int, bool], int] = {}
    for event in sorted((e for e in run.ranks[rank].events if isinstance(e, Replica)), key=lambda e: e.seq):
        if not event.num_steps_later:
            found[event.step, event.after] = event.fingerprint
    return found


def _states(run: Run, rank: int) -> dict[tuple[int, int], tuple[int | None, int, bool | None, bool]]:
    """By (step, later steps) behind which it was: the checksum that the optimizer left, the next one after it, whether
    other ranks' values may be in that, and whether the optimizer left what was there before."""
    states: dict[tuple[int, int], tuple[int | None, int, bool | None, bool]] = {}
    left: int | None = None
    before: int | None = None
    moment = (-1, 0)
    for event in sorted((e for e in run.ranks[rank].events if isinstance(e, Replica)), key=lambda e: e.seq):
        if event.after:
            left, moment = event.fingerprint, (event.step, event.num_steps_later)
        else:
            states[moment] = (left, event.fingerprint, event.exchanged, left is not None and left == before)
            before = event.fingerprint
    return states


def share_updates(data: StepData) -> bool:
    """Whether ranks that all got gradients of some parameters step another part of these each."""
    read: dict[int, set[int]] = {
        rank: {id for event in events if isinstance(event, OptimizerStep) for id in data.params_of(rank, event.params)}
        for rank, events in data.events.items()
    }
    alone: set[int] = set()
    for of_rank in data.tracks.values():
        holders = {rank for rank, track in of_rank.items() if track.leaves}
        stepped = {rank for rank in holders if of_rank[rank].param.id in read[rank]}
        alone |= stepped if len(stepped) == 1 < len(holders) else set()
    return len(alone) > 1


def own_coordinates(data: StepData, contributions: Contributions) -> dict[int, set[int]]:
    """For each rank the data coordinates of the ranks that train one model with it: they reduce gradients together, run
    one pipeline, evaluate the same tokens, or send gradients of activations to one another."""
    place = contributions.coordinate
    joined = [{rank for rank, own in place.items() if own == one} for one in set(place.values())]
    for rank, events in data.events.items():
        for event in events:
            if isinstance(event, Exchange | Reduce | PipelineStep):
                joined.append({rank, *event.group, *getattr(event, "replicate_group", ())} & set(data.events))
    groups = merge([{rank} for rank in data.events], joined)
    return {rank: {place.get(member, member) for member in group} for group in groups for rank in group}


def own_models(data: StepData, own: dict[int, set[int]]) -> list[list[int]]:
    """The groups of ranks that train models of their own: they share no gradient, and no parameter that tells is equal
    in two of them. [] where all ranks train one model, or it cannot be told: functions that are not followed may
    exchange activations between any of them."""
    if data.told(EXCHANGES_PROBE):
        return []
    groups = sorted({tuple(sorted(rank for rank in own if own[rank] == mine)) for mine in own.values()})
    group_of = {rank: group for group in groups for rank in group}
    told: set[tuple[int, ...]] = set()
    for of_rank in data.tracks.values():
        values = [track.begun for track in of_rank.values()]
        constant = all(begun is not None and not np.ptp(begun) for begun in values)
        if len({group_of[rank] for rank in of_rank}) > 1 and not constant:
            return []
        if not constant and all(begun is not None for begun in values):
            told |= {group_of[rank] for rank in of_rank}
    return [list(group) for group in groups] if len(groups) > 1 and told == set(groups) else []


def told_apart(models: list[list[int]]) -> list[str]:
    """That these groups of ranks are judged apart, in words; nothing where there are none."""
    groups = " | ".join(",".join(map(str, ranks)) for ranks in models)
    return [
        f"ranks {groups} hold different models and share no gradient: each is judged on its own tokens (inferred). If "
        "they are meant to train one model, broadcast it before the first step and reduce gradients over all ranks"
    ] * bool(models)


def apart(data: StepData, own: dict[int, set[int]]) -> StepData:
    """The same step with each group's parameters under names of their own, so that each is judged on its own tokens."""
    tracks: dict[ParamKey, dict[int, Track]] = {}
    for (stage, name), of_rank in data.tracks.items():
        groups: dict[frozenset[int], dict[int, Track]] = {}
        for rank, track in of_rank.items():
            groups.setdefault(frozenset(own[rank]), {})[rank] = track
        for mine in groups.values():
            tracks[stage, name if len(groups) == 1 else as_on_rank(name, min(mine))] = mine
    return replace(data, tracks=tracks)
