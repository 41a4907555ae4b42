"""The degrees of the mesh: as declared, else from what reduced, ran and exchanged, and by names of process groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from gradcheck_dist.axes import AXIS_NAMES, MESH_AXES, Axes
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import DATA_PARALLEL, SHARDING, Event, Exchange, PipelineStep, Reduce
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import plural

SETTING = "--axes of `gradcheck run` sets them"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a parameter begins, and how far it goes."""
DATA = "dp"
"""A data axis of which the name does not say whether it shards."""
_NAMES = {
    "dp_replicate": ("dp_replicate", "replicate", "ddp"),
    "dp_shard": ("dp_shard", "shard", "fsdp"),
    DATA: ("dp", "data"),
    "cp": ("cp", "context", "sp", "seq", "sequence", "ulysses", "ring"),
    "tp": ("tp", "tensor"),
    "pp": ("pp", "pipe", "pipeline"),
    "ep": ("ep", "expert"),
}
AXIS_OF = {name: axis for axis, names in _NAMES.items() for name in names}
"""What axis a dimension of this name is, as torchtitan, torchtune, verl, DeepSpeed and Megatron Core call theirs."""
_AROUND = re.compile(r"^mesh_|(_model)?(_parallel)?(_group)?(_gloo)?$")


@dataclass(frozen=True)
class Mesh:
    """Degrees by axis and what they rest on ("declared", or in words). `in_order`: nothing speaks against ranks that
    lie as MESH_AXES orders the axes. `lies_along`: the axis of each group of ranks of which it is known."""

    axes: dict[str, int]
    rests_on: str
    in_order: bool = True
    lies_along: dict[tuple[int, ...], str] = field(default_factory=dict)


def infer_mesh(run: Run, events: dict[int, list[Event]], contributions: Contributions | None = None) -> Mesh:
    """Mesh degrees: as declared, else from the groups that were seen reducing and the pipelines that ran, and from the
    names of process groups where these fit. Ranks that evaluate one batch (as told by `contributions`) and exchange
    activations, or compute with parts of parameters, are tensor parallel."""
    if run.axes is not None:
        return Mesh(run.axes.as_dict(), "declared")
    axes = dict.fromkeys(AXIS_NAMES, 1)
    seen: set[str] = set()
    groups: set[tuple[str, tuple[int, ...]]] = set()
    by_hand = False
    for event in (event for of_rank in events.values() for event in of_rank):
        if isinstance(event, Reduce) and event.impl in DATA_PARALLEL:
            axis = "dp_shard" if event.impl in SHARDING else "dp_replicate"
            # Where nothing is sharded, the second group is that of a hook which reduces over both.
            axes[axis] = max(axes[axis], len(event.group) if axis == "dp_shard" else event.num_ranks)
            axes["dp_replicate"] = max(axes["dp_replicate"], len(event.replicate_group))
            groups |= {(axis, event.group), ("dp_replicate", event.replicate_group)}
            seen.add("DDP groups" if event.impl == "ddp" else "FSDP groups")
        elif isinstance(event, PipelineStep):
            axes["pp"] = max(axes["pp"], len(event.group))
            groups.add(("pp", event.group))
            seen.add("pipelines")
        by_hand = by_hand or isinstance(event, Reduce)
    shared = [size for size, own in exchanging(events, contributions) if not own] if contributions else []
    if shared:
        axes["tp"] = max(shared)
        seen.add("exchanges of activations")
    elif contributions is not None and (num_parts := _num_parts(run, contributions.coordinate, groups)) > 1:
        axes["tp"] = num_parts
        seen.add("parameters in parts")
    named = _named(run, axes["dp_shard"] > 1)
    fitting = _fitting(axes, {axis: len(found[0]) for axis, found in named.items()}, run.world_size)
    if fitting is not None and fitting != axes:
        axes = fitting
        seen.add("names of process groups")
    if fitting is None:
        named = {}
    if not seen:
        nothing = f"no reduction or pipeline was seen among {plural(run.world_size, 'rank')}"
        by_hands = "reductions by hand, which were seen, name no axis"
        return Mesh(axes, f"inferred: {by_hands if by_hand else nothing}; {SETTING}")
    groups |= {(axis, group) for axis, found in named.items() for group in found}
    return Mesh(
        axes, f"inferred from {', '.join(sorted(seen))}; {SETTING}", _in_order(axes, groups), _along(axes, groups)
    )


def _num_parts(run: Run, place: Mapping[int, int], groups: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Of how many parts parameters are of which ranks with one batch (as `place` tells) have each another one while
    they compute, as DTensor says; 1 where none is, or one of more parts than another. What `groups` reduce may lie in
    parts for their sake."""
    reducing = [set(group) for axis, group in groups if axis in ("dp_shard", "dp_replicate")]
    boxes: dict[tuple[int | None, str], dict[int, Box]] = {}
    for rank, trace in run.ranks.items():
        for plan in trace.plans.values():
            param = trace.params.get(plan.param)
            if param is None or plan.partial or plan.offset is None or plan.extent is None:
                continue
            of_ranks = boxes.setdefault((param.stage, param.name), {})
            if rank not in of_ranks or prod(of_ranks[rank][1]) < prod(plan.extent):  # FSDP has smaller ones besides
                of_ranks[rank] = plan.offset, plan.extent
    sizes = set()
    for of_ranks in boxes.values():
        held: dict[int, dict[int, Box]] = {}
        for rank, box in of_ranks.items():
            held.setdefault(place.get(rank, -1 - rank), {})[rank] = box
        alone = [of_batch for of_batch in held.values() if all(len(group & of_batch.keys()) < 2 for group in reducing)]
        sizes |= {len(set(of_batch.values())) for of_batch in alone} - {1}
    return sizes.pop() if len(sizes) == 1 else 1


def exchanging(events: dict[int, list[Event]], contributions: Contributions) -> set[tuple[int, bool]]:
    """The sizes of groups of ranks that exchange activations, and whether each rank has tokens of its own; of groups in
    which only some share theirs, nothing."""
    place = contributions.coordinate
    found = set()
    for group in {event.group for of_rank in events.values() for event in of_rank if isinstance(event, Exchange)}:
        num_batches = len({place.get(rank, -1 - rank) for rank in group})
        if len(group) > 1 and num_batches in (1, len(group)):
            found.add((len(group), num_batches > 1))
    return found


def _named(run: Run, shards: bool) -> dict[str, list[tuple[int, ...]]]:
    """Groups by their names: of axes of which every rank has exactly one, all of one size."""
    of_ranks = [_of_rank(trace.named_groups) for trace in run.ranks.values()]
    found: dict[str, list[tuple[int, ...]]] = {}
    for axis in _NAMES:
        groups = [group for of_rank in of_ranks for group in of_rank.get(axis, ())]
        one_each = all(len(of_rank.get(axis, ())) == 1 for of_rank in of_ranks)
        if one_each and len({len(group) for group in groups}) == 1:
            found[axis] = groups
    if DATA in found:
        found.setdefault("dp_shard" if shards else "dp_replicate", found[DATA])
        del found[DATA]
    return found


def _of_rank(named: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, set[tuple[int, ...]]]:
    groups: dict[str, set[tuple[int, ...]]] = {}
    for name, group in named:
        axis = AXIS_OF.get(_AROUND.sub("", name.lower()))
        if axis is not None:
            groups.setdefault(axis, set()).add(group)
    return groups


def _fitting(seen: dict[str, int], named: dict[str, int], world_size: int) -> dict[str, int] | None:
    """What was seen and named, together: the first of the possible readings that has as many ranks as there are, with
    room for what was seen. A wrapper may reduce over several axes at once (torchtitan's "fsdp" is dp_shard * cp), which
    the names take apart."""
    if not named:
        return None
    both = seen | named
    readings = [dict.fromkeys(AXIS_NAMES, 1) | named, both]
    readings += [both | {axis: both[axis] // both["cp"]} for axis in ("dp_shard", "dp_replicate")]
    for axes in readings:
        data = axes["dp_replicate"] * axes["dp_shard"] * axes["cp"]
        fits = prod(axes[axis] for axis in MESH_AXES) == world_size and axes["pp"] % seen["pp"] == 0
        if fits and data % (seen["dp_replicate"] * seen["dp_shard"]) == 0 and data % axes["ep"] == 0:
            return axes
    return None


def _along(axes: dict[str, int], groups: Iterable[tuple[str, tuple[int, ...]]]) -> dict[tuple[int, ...], str]:
    """The axis of each group that is as large as one axis alone; of a group that two are called by, none."""
    found: dict[tuple[int, ...], set[str]] = {}
    for axis, group in groups:
        if len(group) == axes[axis] > 1:
            found.setdefault(tuple(sorted(group)), set()).add(axis)
    return {group: min(names) for group, names in found.items() if len(names) == 1}


def _in_order(axes: dict[str, int], groups: set[tuple[str, tuple[int, ...]]]) -> bool:
    """Whether ranks that lie as MESH_AXES orders the axes would form these groups. One of another size than its axis
    spans several, and tells nothing."""
    try:
        mesh = Axes(**axes)
    except GradcheckError:
        return True  # and what lies along an axis is shown of no such mesh
    for axis, group in groups:
        if len(group) == axes[axis] > 1 and axis != "ep":
            places = [mesh.coordinates(rank) for rank in group if rank < mesh.world_size]
            others = {tuple(place[name] for name in MESH_AXES if name != axis) for place in places}
            if len(others) > 1:
                return False
    return True
