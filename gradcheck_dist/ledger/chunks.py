"""Pipelines by hand in which a rank runs several stages (model chunks, virtual stages): which loss its passes serve.

A rank's passes are numbered in the order in which they ran, so those of one microbatch have other numbers in each chunk
and on each rank. The probes sample what left each stage's input and what entered each output: a pass that no loss
begins goes on with what another one handed over, found by its values, and so back to the loss. Then the step is
written as torch's own pipelines are: stages have numbers, and all passes of a microbatch those of its loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from gradcheck_dist.events import Backward, Event, HandedOn, LossGradient, LossTerm, PipelineStep, Reduce, StageGradient
from gradcheck_dist.ledger.contributions import losses_of_rank
from gradcheck_dist.ledger.moved import ParamKey, plain_name
from gradcheck_dist.ledger.names import merge
from gradcheck_dist.ledger.tracks import Slot, StepData, Track, Values
from gradcheck_dist.ledger.transit import MIN_ELEMENTS, RESIDUAL
from gradcheck_dist.wording import numbered

SCHEDULE = "by hand"
"""The name of a schedule that was put together so."""
SAME = 1e-5
"""Relative difference up to which two gradients are as good an end: tensor-parallel ranks hold copies."""
ROWS = 4096
"""Ends that are compared with all others at a time."""

Node = tuple[int, Slot]
"""(rank, accumulation step and microbatch): one backward pass"""


@dataclass
class _Pipelines:
    """`depth`: how many stages lie between a pass and its loss; `slot`: the number of the microbatch that it serves;
    `owner`: the rank with the loss of each rank."""

    depth: dict[Node, int] = field(default_factory=dict)
    slot: dict[Node, Slot] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return 1 + max(self.depth.values())


def with_chunks(data: StepData) -> StepData:
    """The same step with the stages of such a pipeline; the step itself where there is none, or not all is known."""
    passes = _passes(data)
    losses = {rank: set(losses_of_rank(events)) for rank, events in data.events.items()}
    without = [(rank, slot) for rank, slot in passes if slot not in losses[rank]]
    if not without or not any(losses.values()):
        return data
    found = _pipelines(data, passes, losses, _handed_over(data, passes, without))
    if found is None:
        return data
    stages: dict[int, set[int]] = defaultdict(set)
    for (rank, _), depth in found.depth.items():
        stages[rank].add(found.num_stages - 1 - depth)
    events = dict(data.events)
    for rank, of_rank in stages.items():
        # What a pass begins with was handed over between stages, also where both are on one rank.
        kept = [_renumbered(event, rank, found) for event in events[rank] if not isinstance(event, HandedOn)]
        events[rank] = [_of_schedule(rank, found, of_rank, kept[0]), *kept]
    return _with_stages(replace(data, events=events), found, _stages_of_params(data, passes, found))


def told_chunks(data: StepData) -> list[str]:
    """What a step's stages rest on, in words; nothing where the trainer's schedule is torch's."""
    made = [e for events in data.events.values() for e in events if isinstance(e, PipelineStep)]
    if not any(event.schedule == SCHEDULE for event in made):
        return []
    return [
        f"backward passes that no loss begins hand on what others left at a stage's input: taken for a pipeline of "
        f"{max(event.num_stages for event in made)} stages by hand, several of them on one rank"
    ]


def told_unlaid(data: StepData) -> list[str]:
    """That passes begin with what stages on other ranks left, though not all could be laid to losses; nothing else."""
    passes = _passes(data)
    losses = {rank: set(losses_of_rank(events)) for rank, events in data.events.items()}
    without = [(rank, slot) for rank, slot in passes if slot not in losses[rank]]
    handed = _handed_over(data, passes, without) if without and any(losses.values()) else {}
    over = [(node[0], source[0]) for node, source in handed.items() if node[0] != source[0]]
    if not over:
        return []
    counts = ", ".join(f"{sum(rank == own for own, _ in passes)} on rank {rank}" for rank in sorted(data.events))
    return [
        f"backward passes on {numbered('rank', {rank for rank, _ in over})} begin with gradients that left stages on "
        f"{numbered('rank', {rank for _, rank in over})}: a pipeline by hand, of which not every pass could be laid to "
        f"a loss ({counts}). A stage that leaves out a microbatch's backward looks so: compare how often each of them "
        "calls it. Each rank is judged on its own tokens"
    ]


def _passes(data: StepData) -> dict[Node, Backward]:
    """All backward passes, in the order of ranks and time; {} where some have stages already, or rank is one alone."""
    found: dict[Node, Backward] = {}
    for rank, events in sorted(data.events.items()):
        for event in events:
            if isinstance(event, PipelineStep) or getattr(event, "stage", None) is not None:
                return {}
            if isinstance(event, Backward):
                found.setdefault((rank, (event.accumulation_step, event.microbatch)), event)
    return found if len(data.events) > 1 else {}


def _handed_over(data: StepData, passes: Mapping[Node, Backward], without: Iterable[Node]) -> dict[Node, Node]:
    """For each pass that no loss begins the one whose input's gradient it began with, where that was seen."""
    entered: dict[Node, list[StageGradient]] = defaultdict(list)
    left: dict[tuple[int, ...], list[tuple[Node, StageGradient]]] = defaultdict(list)
    for rank, events in data.events.items():
        for event in events:
            if isinstance(event, StageGradient) and len(event.values) % 4 == 0:
                node = (rank, (event.accumulation_step, event.microbatch))
                if event.side == "output":
                    entered[node].append(event)
                else:
                    left[event.shape].append((node, event))
    sent = {shape: _directions([event for _, event in ends]) for shape, ends in left.items()}
    used: set[int] = set()
    found: dict[Node, Node] = {}
    for node in without:
        for end in entered.get(node, ()):
            ends = left.get(end.shape, [])
            fits = _fitting(end, sent.get(end.shape), used, node, ends)
            if fits is not None:
                found[node] = ends[fits][0]
                used.add(id(ends[fits][1]))
                break
    return found


def _fitting(
    end: StageGradient, sent: np.ndarray | None, used: set[int], node: Node, ends: list[tuple[Node, StageGradient]]
) -> int | None:
    """Which of the ends that left a stage this one is a multiple of: the nearest, of copies one that nobody took."""
    (entered,) = _directions([end])
    if sent is None or sent.shape[1] != len(entered) or not entered.any():
        return None
    apart = np.concatenate(
        [
            np.linalg.norm(part - np.outer(part @ entered, entered), axis=1)
            for part in np.array_split(sent, -(-len(sent) // ROWS))
        ]
    )
    # Nothing is handed to the pass that it comes from, nor, on one rank, before it is there.
    own = [other == node or (other[0] == node[0] and one.seq > end.seq) for other, one in ends]
    apart[np.array(own) | ~sent.any(axis=1)] = np.inf
    least = float(apart.min())
    if least > RESIDUAL:
        return None
    options = np.flatnonzero(apart <= max(SAME, 1.5 * least)).tolist()
    return min(options, key=lambda at: (id(ends[at][1]) in used, ends[at][0]))


def _directions(ends: list[StageGradient]) -> np.ndarray:
    """Unit vectors, shape (ends, samples); zeros where there is too little to tell."""
    length = max(len(end.values) for end in ends)
    rows = np.zeros((len(ends), length // 4))
    for row, end in zip(rows, ends, strict=True):
        values = np.frombuffer(end.values, dtype="<f4").astype(float)
        if len(values) == len(row) and np.isfinite(values).all() and np.count_nonzero(values) >= MIN_ELEMENTS:
            row[:] = values / np.linalg.norm(values)
    return rows


def _pipelines(
    data: StepData, passes: Mapping[Node, Backward], losses: Mapping[int, set[Slot]], handed: Mapping[Node, Node]
) -> _Pipelines | None:
    """All passes traced back to losses; None where one cannot be, or a stage serves not just all of its losses."""
    if not any(node[0] != source[0] for node, source in handed.items()):
        return None
    found = _Pipelines()
    number = {rank: {slot: (index, 0) for index, slot in enumerate(sorted(of))} for rank, of in losses.items()}
    unknown: dict[tuple[int, int | None], list[Node]] = defaultdict(list)
    known: dict[tuple[int, int | None], set[int]] = defaultdict(set)
    for node, event in passes.items():
        chain = [node]
        while chain[-1] in handed and handed[chain[-1]] not in chain:
            chain.append(handed[chain[-1]])
        rank, slot = chain[-1]
        if slot not in losses[rank]:
            unknown[node[0], event.params].append(node)
            continue
        if found.owner.setdefault(node[0], rank) != rank:
            return None
        found.depth[node], found.slot[node] = len(chain) - 1, number[rank][slot]
        known[node[0], event.params].add(len(chain) - 1)
    for like, nodes in unknown.items():
        # Values did not tell: another pass of the same chunk tells the stage, and the order the microbatch.
        if len(known[like]) != 1 or (depth := next(iter(known[like]))) == 0:
            return None
        rank = like[0]
        taken = {found.slot[node] for node, at in found.depth.items() if node[0] == rank and at == depth}
        rest = sorted(set(number[found.owner[rank]].values()) - taken)
        if len(rest) != len(nodes):
            return None
        for node, slot in zip(nodes, rest, strict=True):
            found.depth[node], found.slot[node] = depth, slot
    served: dict[tuple[int, int], set[Slot]] = defaultdict(set)
    for node, depth in found.depth.items():
        served[node[0], depth].add(found.slot[node])
    if any(slots != set(number[found.owner[rank]].values()) for (rank, _), slots in served.items()):
        return None
    return found if all(found.owner[rank] == rank for rank, of in losses.items() if of) else None


def _of_schedule(rank: int, found: _Pipelines, stages: set[int], first: Event) -> PipelineStep:
    """What torch's schedules tell of themselves."""
    owner = found.owner[rank]
    return PipelineStep(
        seq=-1,
        t_ns=first.t_ns,
        step=first.step,
        schedule=SCHEDULE,
        num_microbatches=len({slot for node, slot in found.slot.items() if found.owner[node[0]] == owner}),
        scale_grads=None,
        group=tuple(sorted(peer for peer, own in found.owner.items() if own == owner)),
        stages=tuple(sorted(stages)),
        num_stages=found.num_stages,
        accumulation_step=0,
    )


def _renumbered(event: Event, rank: int, found: _Pipelines) -> Event:
    """An event under its microbatch's number, and in its pass's stage where it may have one."""
    number = getattr(event, "accumulation_step", None)
    if number is None:
        return event
    node = (rank, (number, getattr(event, "microbatch", 0)))
    slot = found.slot.get(node)
    changes: dict[str, object] = {}
    if slot is None:  # behind the last pass
        changes["accumulation_step"] = 1 + max(one for other, (one, _) in found.slot.items() if other[0] == rank)
    else:
        changes["accumulation_step"], changes["microbatch"] = slot
        if isinstance(event, Backward | LossGradient | LossTerm | StageGradient):
            changes["stage"] = found.num_stages - 1 - found.depth[node]
    return msgspec.structs.replace(event, **{name: new for name, new in changes.items() if hasattr(event, name)})


def _stages_of_params(data: StepData, passes: Mapping[Node, Backward], found: _Pipelines) -> dict[tuple[int, int], int]:
    """By rank and parameter the stage whose passes alone gave it gradients."""
    stages: dict[tuple[int, int], set[int]] = defaultdict(set)
    for node, event in passes.items():
        for param in data.params_of(node[0], event.params):
            stages[node[0], param].add(found.num_stages - 1 - found.depth[node])
    return {at: of.pop() for at, of in stages.items() if len(of) == 1}


def _with_stages(data: StepData, found: _Pipelines, stages: Mapping[tuple[int, int], int]) -> StepData:
    """The same step, its parameters told by their stages, their leaves under the numbers of the microbatches."""
    parts: dict[ParamKey, dict[ParamKey, dict[int, Track]]] = defaultdict(lambda: defaultdict(dict))
    moved: dict[ParamKey, ParamKey] = {}
    for key, of_rank in data.tracks.items():
        apart: dict[int, set[int]] = defaultdict(set)
        for rank, track in of_rank.items():
            apart[stages.get((rank, track.param.id), key[0])].add(rank)
        # Copies of one matrix on several stages stay one parameter.
        together = [set(of_rank)] if key in data.tied else _reduced_together(data, of_rank) if len(apart) > 1 else []
        for ranks in merge(list(apart.values()), together):
            first = min(ranks)
            stage = stages.get((first, of_rank[first].param.id), key[0])
            parts[stage, plain_name(key[1])][key] |= {rank: _relabelled(of_rank[rank], found) for rank in ranks}
            moved.setdefault(key, (stage, key[1]))
    tracks: dict[ParamKey, dict[int, Track]] = {}
    for (stage, name), of_key in parts.items():
        for key, of_rank in of_key.items():
            new = (stage, name if len(of_key) == 1 else key[1])
            tracks[new] = of_rank
            moved[key] = new if moved[key] == (stage, key[1]) else moved[key]
    tied = {moved.get(key, key): copies for key, copies in data.tied.items()}
    beside = {moved.get(key, key): moved.get(other, other) for key, other in data.beside.items()}
    perhaps = [(moved.get(one, one), moved.get(other, other)) for one, other in data.perhaps_tied]
    return replace(data, tracks=tracks, tied=tied, beside=beside, perhaps_tied=perhaps)


def _reduced_together(data: StepData, of_rank: Mapping[int, Track]) -> list[set[int]]:
    """Groups of ranks over which this parameter's gradient was reduced."""
    return [
        {*event.group, *event.replicate_group}
        for rank, track in of_rank.items()
        for event in data.events[rank]
        if isinstance(event, Reduce) and len(event.group) > 1 and track.param.id in data.params_of(rank, event.params)
    ]


def _is_again(rank: int, leaves: Mapping[Slot, tuple[int, Values]], slot: Slot, new: Slot, found: _Pipelines) -> bool:
    """Whether a pass brings a parameter what an earlier one of its stage has brought of this microbatch already: that
    is no other part of its gradient, and shows in the weights."""
    own = leaves[slot][1].data
    for other, (_, values) in leaves.items():
        if other >= slot or found.slot.get((rank, other)) != new:
            continue
        alike = found.depth.get((rank, other)) == found.depth.get((rank, slot)) and own.shape == values.data.shape
        size = float(np.linalg.norm(np.nan_to_num(own)))
        if alike and size and float(np.linalg.norm(np.nan_to_num(own - values.data))) <= SAME * size:
            return True
    return False


def _relabelled(track: Track, found: _Pipelines) -> Track:
    leaves: dict[Slot, tuple[int, Values]] = {}
    for slot, (seq, values) in track.leaves.items():
        new = found.slot.get((track.rank, slot), slot)
        if new in leaves and _is_again(track.rank, track.leaves, slot, new, found):
            continue
        if new in leaves:  # one microbatch in two passes: by input and by weights, or both stages of a tied matrix
            values = replace(values, data=leaves[new][1].data + values.data)
        leaves[new] = (seq, values)
    return replace(track, leaves=leaves)
