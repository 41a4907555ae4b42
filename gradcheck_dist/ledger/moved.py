"""Modules that no other one holds are named in the order of their first calls, which may be another one on each rank.

A tower that only some batches need, an expert that this rank's tokens did not reach: whatever is called after it has
another name there, or none. Such parameters are found again by the values that they began with.
"""

from __future__ import annotations

from collections import defaultdict

from gradcheck_dist.events import UNNAMED, Param, Reduce
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run

ParamKey = tuple[int, str]
"""(pipeline stage, -1 without one; fully qualified name): one parameter of the model, on whichever ranks it lies."""


def param_key(param: Param) -> ParamKey:
    """What the rank itself calls the parameter."""
    return (-1 if param.stage is None else param.stage, param.name)


def as_on_rank(name: str, rank: int) -> str:
    """The name of a parameter that is another one on other ranks, told by the first rank that holds it."""
    return f"{name} (as on rank {rank})"


def plain_name(name: str) -> str:
    """What ranks call a parameter, whichever of several it is."""
    return name.partition(" (as on rank ")[0]


def moved(run: Run) -> dict[tuple[int, int], ParamKey]:
    """For (rank, parameter id) the key under which the first rank has it, where the two call it otherwise.

    Only where the first rank's parameter of that name is another one, or there is none because no module has shown it,
    only values that no other parameter of the two ranks began with, and only what both reduce over a group that holds
    both: stages of a pipeline may have begun alike. What began as a constant follows its module's weight.
    """
    first, *others = sorted(run.ranks) or [0]
    found: dict[tuple[int, int], ParamKey] = {}
    for rank in others:
        found |= {(rank, id): key for id, key in _found_again(run.ranks[first], run.ranks[rank]).items()}
    return found


def _found_again(base: RankTrace, trace: RankTrace) -> dict[int, ParamKey]:
    known = {param_key(param): param for param in base.params.values()}
    astray = {
        param.id: param
        for param in trace.params.values()
        if (param_key(param) in known and not _alike(param, known[param_key(param)])) or param.name.startswith(UNNAMED)
    }
    theirs, mine = _by_values(base), _by_values(trace)
    both = frozenset((base.rank, trace.rank))
    reduced, wanted = _reduced(base, both), _reduced(trace, both)
    found: dict[int, ParamKey] = {}
    modules: dict[ParamKey, ParamKey] = {}
    for id, param in astray.items():
        there = theirs.get(_values(param), [])
        if param.start is None or len(there) != 1 or len(mine[_values(param)]) != 1:
            continue
        (other,) = there
        if other.id in reduced and id in wanted:
            found[id] = param_key(other)
            modules[_module(param)] = _module(other)
    for id, param in astray.items():
        if param.start is None and (module := modules.get(_module(param))) is not None:
            key = (module[0], module[1] + param.name.removeprefix(_module(param)[1]))
            if key in known and known[key].shape == param.shape:
                found[id] = key
    if _is_another_order(found, base, trace):
        return {}
    taken = set(found.values())
    for id, param in trace.params.items():
        if id not in found and param_key(param) in taken:
            found[id] = (param_key(param)[0], as_on_rank(param.name, trace.rank))
    return found


def _is_another_order(found: dict[int, ParamKey], base: RankTrace, trace: RankTrace) -> bool:
    """Whether both ranks have these very names below one wrapper, which numbers parameters in the order of their
    modules: it made copies of what has other names, and the names are right."""
    own = {param_key(trace.params[id]) for id in found}
    theirs = {id for id, param in base.params.items() if param_key(param) in own}
    return own == set(found.values()) and _share_wrapper(base, theirs) and _share_wrapper(trace, set(found))


def _share_wrapper(trace: RankTrace, params: set[int]) -> bool:
    """Whether one wrapper reduces all of these parameters."""
    reduced: dict[int, set[int]] = defaultdict(set)
    for event in trace.events:
        if isinstance(event, Reduce) and event.wrapper is not None:
            reduced[event.wrapper].update(trace.param_sets.get(event.params, ()))
    return any(params <= of_wrapper for of_wrapper in reduced.values())


def _module(param: Param) -> ParamKey:
    return (param_key(param)[0], param.name[: param.name.rfind(".") + 1])


def _values(param: Param) -> tuple[tuple[int, ...], int | None]:
    return (tuple(param.shape), param.fingerprint)


def _alike(one: Param, other: Param) -> bool:
    return _values(one) == _values(other)


def _by_values(trace: RankTrace) -> dict[tuple[tuple[int, ...], int | None], list[Param]]:
    found: dict[tuple[tuple[int, ...], int | None], list[Param]] = defaultdict(list)
    for param in trace.params.values():
        if param.fingerprint is not None:
            found[_values(param)].append(param)
    return found


def _reduced(trace: RankTrace, ranks: frozenset[int]) -> set[int]:
    """Parameters whose gradients the rank reduces over a group that holds these ranks."""
    sets = {event.params for event in trace.events if isinstance(event, Reduce) and ranks <= {*event.group}}
    return {param for one in sets for param in trace.param_sets.get(one, ())}
