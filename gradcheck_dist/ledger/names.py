"""Which tensors on which ranks are one parameter: by name, by the values that they began with, by what reduces them."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

from gradcheck_dist.events import Backward, Event, Exchange, Loss, LossGradient, Param, Reduce
from gradcheck_dist.ledger.contributions import UNKNOWN
from gradcheck_dist.ledger.moved import ParamKey as ParamKey
from gradcheck_dist.ledger.moved import as_on_rank, moved
from gradcheck_dist.ledger.moved import param_key as param_key
from gradcheck_dist.ledger.moved import plain_name as plain_name
from gradcheck_dist.ledger.parted import Parted, Sizes
from gradcheck_dist.trace.run import Run

Channel = tuple[tuple[int, ...], str | None]
"""The ranks of a process group, and its name where the program made it."""


def distinct_names(run: Run) -> dict[tuple[int, int], ParamKey]:
    """The key of each (rank, parameter id). Plain tensors of one name that began with unequal values are different
    parameters, unless a reduction combines them: ranks whose tensors began alike or are reduced together share one key,
    named after their first rank. A bias that began as zeros everywhere is as different as its module's weight, unless
    the module says which of its parameters are partitioned; so is what lies in that module and has the size of its part
    (adapters), and whatever says that it is partitioned. A rank that never has a loss is another stage of a pipeline by
    hand: its names are its own."""
    return names_and_sizes(run)[0]


def names_and_sizes(run: Run) -> tuple[dict[tuple[int, int], ParamKey], Sizes]:
    """The same, and what values tell of the sizes of layers."""
    found: dict[ParamKey, dict[int, Param]] = defaultdict(dict)
    called = moved(run)
    for rank, trace in sorted(run.ranks.items()):
        for param in trace.params.values():
            found[called.get((rank, param.id), param_key(param))][rank] = param
    reduced, without_loss = _reduced_together(run, called), _without_loss(run)
    parts = {
        key: _sharded_apart(params, reduced[key]) or _parts(params, reduced[key], without_loss)
        for key, params in found.items()
    }
    names: dict[tuple[int, int], ParamKey] = {}
    parted = Parted(found, _of_one_stage(run, parts, without_loss))
    for (stage, name), params in found.items():
        apart = parts[stage, name]
        of_module = (stage, f"{name.removesuffix('bias')}weight")
        weight = parts.get(of_module, [])
        if len(weight) > 1 and all(map(_is_constant, params.values())):
            if _all_partitioned(params):
                apart = _both(apart, weight)
            elif not _all_partitioned(found[of_module]):
                apart = _both(apart, merge(weight, reduced[stage, name]))
        elif len(apart) == 1 and (beside := parted.parts_of((stage, name))):
            apart = _both(apart, merge(beside, reduced[stage, name]))
        for part in apart:
            own = name if len(apart) == 1 else as_on_rank(name, min(part))
            names |= {(rank, params[rank].id): (stage, own) for rank in part}
    return names, parted.sizes


def _reduced_together(run: Run, called: dict[tuple[int, int], ParamKey]) -> dict[ParamKey, set[tuple[int, ...]]]:
    """Sets of ranks over which each parameter's gradient was reduced."""
    groups: dict[ParamKey, set[tuple[int, ...]]] = defaultdict(set)
    for rank, trace in run.ranks.items():
        done = {
            (event.params, (*event.group, *event.replicate_group))
            for event in trace.events
            if isinstance(event, Reduce) and len(event.group) > 1
        }
        for params, group in done:
            for param in trace.param_sets.get(params, ()):
                if param in trace.params:
                    groups[called.get((rank, param), param_key(trace.params[param]))].add(group)
    return groups


def crossed(
    run: Run, events: dict[int, list[Event]], names: dict[tuple[int, int], ParamKey]
) -> dict[tuple[int, int], ParamKey]:
    """The key of each (rank, parameter id) whose gradient a collective of the step combines with that of another name:
    the n-th over a group on one rank is the n-th on every other. Both go by the first rank's name. Several groups of
    the same ranks are each in an order of their own (one for each parameter, from threads or without waiting)."""
    calls: dict[Channel, dict[int, list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in events.items():
        for event in of_rank:
            if isinstance(event, Reduce) and event.impl in ("all_reduce", "reduce") and len(event.group) > 1:
                calls[event.group, event.channel][rank].append(run.ranks[rank].param_sets.get(event.params, ()))
    found: dict[tuple[int, int], ParamKey] = {}
    for (group, _), of_group in calls.items():
        first, *others = (of_group.get(rank, []) for rank in group)
        if any(list(map(len, other)) != list(map(len, first)) for other in others):
            continue
        for rank, other in zip(group[1:], others, strict=True):
            for mine, theirs in zip(sum(first, ()), sum(other, ()), strict=True):
                key, name = names.get((group[0], mine)), names.get((rank, theirs))
                pair = [run.ranks[at].params[id] for at, id in ((group[0], mine), (rank, theirs)) if key and name]
                if key is None or name is None or key == name or pair[0].shape != pair[1].shape:
                    continue
                told_apart = plain_name(key[1]) == plain_name(name[1]) and all(one.partitioned for one in pair)
                if not told_apart:
                    found[rank, theirs] = key
    own = {(rank, key): id for (rank, id), key in names.items()}
    # Where the rank holds one of that name too, and that stays what it is, nothing is renamed.
    kept = {(rank, id) for (rank, id), key in found.items() if own.get((rank, key), id) in (id, *_of(found, rank))}
    return {at: key for at, key in found.items() if at in kept}


def _of(found: Iterable[tuple[int, int]], rank: int) -> Iterator[int]:
    return (id for at, id in found if at == rank)


def _without_loss(run: Run) -> set[int]:
    """Ranks that ran backward passes and never had a loss that counts anything, where others had: a stage that hands
    its output to the next one in a function of its own begins backward at what that function gave."""
    ranks = {rank for rank, trace in run.ranks.items() if any(isinstance(e, Backward) for e in trace.events)}
    having: set[int] = set()
    counting: set[int] = set()
    for rank, trace in run.ranks.items():
        counted = {e.loss_id for e in trace.events if isinstance(e, Loss) and e.reduction != UNKNOWN}
        roots = {e.loss_id for e in trace.events if isinstance(e, LossGradient)}
        having |= {rank} if roots else set()
        parts = any(isinstance(e, LossGradient) and e.class_scale is not None for e in trace.events)
        counting |= {rank} if roots & counted or parts else set()
    having = counting or having
    return ranks - having if having else set()


def _of_one_stage(
    run: Run, parts: dict[ParamKey, list[set[int]]], without_loss: set[int]
) -> dict[ParamKey, list[set[int]]]:
    """The parts of each parameter, but for those that lie on unlike stages of a pipeline by hand: layers of their own
    under one name. Ranks of one stage combine activations."""
    if not without_loss:
        return parts
    groups = {e.group for trace in run.ranks.values() for e in trace.events if isinstance(e, Exchange)}
    stages = merge([{rank} for rank in run.ranks], groups)
    apart = {
        key: sets
        for key, sets in parts.items()
        if any(sum(not one.isdisjoint(stage) for one in sets) > 1 for stage in stages)
    }
    return {key: apart.get(key, [set[int]().union(*sets)]) for key, sets in parts.items()}


def _parts(params: dict[int, Param], reduced: Iterable[Iterable[int]], without_loss: set[int]) -> list[set[int]]:
    """Sets of ranks on which tensors of one name are one parameter. Modules that no other one holds are named in the
    order of their first calls, which may be another one on another rank: what differs in shape is not the same."""
    shapes = {param.shape for param in params.values()}
    if all(param.expert for param in params.values()) and reduced and len(shapes) == 1:
        return merge([{rank} for rank in params], reduced)  # which of them are copies only their reductions tell
    plain = all(param.fingerprint is not None for param in params.values())
    alike: dict[tuple[int, ...], dict[object, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank, param in params.items():
        began = param.fingerprint if plain else None
        alike[tuple(param.shape)][began, param.stage is None and rank in without_loss].add(rank)
    return [part for of_shape in alike.values() for part in merge(list(of_shape.values()), reduced)]


def _sharded_apart(params: dict[int, Param], reduced: Iterable[Iterable[int]]) -> list[set[int]]:
    """Sets of ranks each of which shards a whole tensor of this name between them, where some sets began with other
    values than others: experts, and layers that were cut by hand, below FSDP. Empty where that is not so, or where a
    layout says that their parts are of one tensor."""
    if any(param.placements.count("Shard") != 1 for param in params.values()):
        return []
    began: dict[tuple[int | None, ...], set[int]] = defaultdict(set)
    for part in merge([{rank} for rank in params], reduced):
        began[tuple(params[rank].start for rank in sorted(part))] |= part
    sizes = {len(starts) for starts in began}
    told = all(any(start is not None for start in starts) for starts in began)
    return list(began.values()) if len(began) > 1 and len(sizes) == 1 and min(sizes) > 1 and told else []


def _both(parts: list[set[int]], others: list[set[int]]) -> list[set[int]]:
    """Ranks that are together in both; those of which the others know nothing stay as they are."""
    known = set[int]().union(*others)
    shared = [part & other for part in parts for other in others]
    return [part for part in [*shared, *(part - known for part in parts)] if part]


def _all_partitioned(params: dict[int, Param]) -> bool:
    return all(param.partitioned is True for param in params.values())


def _is_constant(param: Param) -> bool:
    """Whether what a rank holds of a tensor began as zeros, or, below FSDP, as one number."""
    return is_zero(param) or (param.fingerprint is None and param.start is None)


def merge(parts: list[set[int]], groups: Iterable[Iterable[int]]) -> list[set[int]]:
    """The parts, those that have ranks in one group joined."""
    if len(parts) > 1:
        for group in groups:
            met = [part for part in parts if not part.isdisjoint(group)]
            if len(met) > 1:
                parts = [part for part in parts if part.isdisjoint(group)] + [set[int]().union(*met)]
    return parts


def is_zero(param: Param) -> bool:
    """Whether a tensor began as zeros, as far as was sampled."""
    size = {"float64": 8, "float32": 4}.get(param.dtype, 2)
    return param.fingerprint == zlib.crc32(bytes(param.num_positions * size))
