"""What is known about a step besides its gradients: degrees, counts, who is where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod

from gradcheck_dist.axes import AXIS_NAMES
from gradcheck_dist.diagnosis.weights.mesh import Mesh, exchanging, infer_mesh
from gradcheck_dist.events import AmpScale, AmpUnscale, Backward, Event, Loss, OptimizerStep, PipelineStep
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.evaluated import left_aside
from gradcheck_dist.trace.run import Run

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes along which ranks hold other tokens."""
RANKS_PER_BATCH = "ranks_per_batch"
"""How many ranks evaluate each batch, of all or of a reduction's group, where no single axis is known to be that."""
LOSS_SCALE = "loss_scale"
EVALUATED = "evaluated_tokens"
"""The tokens of all losses of a step, also of those that never went backward; where there are any of these."""
RANKS_PER_EXCHANGE, EXCHANGE_GROUPS = "ranks_per_exchange", "exchange_groups"
"""How many ranks with tokens of their own exchange activations (context or expert parallel), and how many such groups
there are, where no axis of the mesh is known to be either."""


@dataclass
class StepContext:
    """Degrees and counts of one step; `quantities` maps the names used in explanations to their values, `terms` are the
    auxiliary loss terms. `relative`: weights are only compared with one another.
    `of_means`: each contribution counts as one mean, for nobody counts what it is a mean of. `as_written`: passes of
    several losses are judged by one of them, without its coefficient. `of_samples`: contributions count sequences, not
    tokens; `of_weighted`: tokens that weights of their own multiply; `of_tasks`: the losses of each forward pass are
    differentiated one by one. `num_handed_over`: ranks whose gradients were seen to leave another pipeline stage.
    `again`: passes that bring no tokens, since their loss is differentiated again, and where these entered;
    `shared_out`: and the weight of the loss is shared out among them.
    `apart`: ranks are judged on tokens of their own each. `models`: the contributions of each model, all of them
    where they have a parameter in common; none where that is not known."""

    step: int
    world_size: int
    mesh: Mesh
    objective: str
    objective_from: str
    num_accumulation: int
    num_microbatches: int
    contributions: Contributions
    num_stages: int = 1
    terms: tuple[str, ...] = ()
    relative: bool = False
    of_means: bool = False
    as_written: bool = False
    of_samples: bool = False
    of_weighted: bool = False
    of_tasks: bool = False
    num_handed_over: int = 0
    again: Mapping[ContributionKey, ContributionKey] = field(default_factory=dict)
    shared_out: bool = False
    apart: bool = False
    models: Sequence[Set[ContributionKey]] = ()
    quantities: dict[str, float] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    scenario: str | None = None

    @property
    def axes(self) -> dict[str, int]:
        return self.mesh.axes

    def judged_on(self, contributions: Contributions) -> None:
        """Take these for the step's contributions. Passes that were left out because their gradients were thrown away
        and their tokens evaluated again (sharpness-aware training) are no accumulation steps, and no degree."""
        left = {key: c for key, c in self.contributions.by_key.items() if key not in contributions.by_key}
        if any(not c.weighs_nothing for c in left.values()):
            self._count_passes(contributions.by_key)
        self.contributions = contributions

    def counted_once(self, again: Mapping[ContributionKey, ContributionKey]) -> None:
        """Passes that differentiate a loss `again` are no accumulation steps either, and bring no tokens."""
        self.again = again
        if again:
            self._count_passes(key for key in self.contributions.by_key if key not in again)
            if self.contributions.num_tokens:
                self.quantities["num_tokens"] = float(self.contributions.num_tokens)

    def _count_passes(self, keys: Iterable[ContributionKey]) -> None:
        steps: dict[int, set[int]] = {}
        for coordinate, step, _ in keys:
            steps.setdefault(coordinate, set()).add(step)
        self.quantities["accumulation_steps"] = float(max(map(len, steps.values()), default=1))

    def counts_forwards(self, forwards: Sequence[Sequence[ContributionKey]]) -> None:
        """Take forward passes for accumulation steps, where each is differentiated in several passes."""
        if forwards:
            self.of_tasks = True
            self.quantities["accumulation_steps"] = float(len(forwards) // len({keys[0][0] for keys in forwards}))

    def ranks_per_batch(self, group: Sequence[int]) -> int:
        """How many ranks of a group evaluate each batch: 1 where all have one of their own, or not all equally many."""
        place = [self.contributions.coordinate.get(rank, -1 - rank) for rank in group]
        counts = {place.count(one) for one in place}
        return counts.pop() if len(counts) == 1 else 1

    def group_name(self, size: int, group: Sequence[int] = ()) -> str:
        """How a reduce group of this size is called: the axis of these ranks where it is known, else the axes it spans
        when exactly one set of them fits."""
        if (axis := self.mesh.lies_along.get(tuple(sorted(group)))) is not None:
            return axis
        dp = {name: self.axes[name] for name in ("dp_replicate", "dp_shard", "cp") if self.axes.get(name, 1) > 1}
        for name, degree in dp.items():
            if degree == size:
                return name
        product = 1
        for degree in dp.values():
            product *= degree
        if product == size and dp:
            return " * ".join(dp) if len(dp) == 1 else f"({' * '.join(dp)})"
        return "world_size" if size == self.world_size else "group_size"


def _unnamed_degrees(context: StepContext, events: dict[int, list[Event]]) -> dict[str, float]:
    """Degrees that no axis is known to be: of ranks that share a batch, and of those that exchange activations."""
    contributions, axes = context.contributions, context.axes
    data_ranks, found = contributions.num_coordinates, {}
    shares = {len(ranks) for ranks in contributions.ranks_of_coordinates()}
    shared = shares.pop() if len(shares) == 1 else 1
    parted = [axes[name] for name in ("tp", "pp") if axes[name] > 1]
    if (not parted and context.num_stages == 1) or (len(parted) > 1 and shared == prod(parted)):
        found[RANKS_PER_BATCH] = float(shared)
    sizes = {size for size, own in exchanging(events, contributions) if own}
    if len(sizes) == 1 and axes["cp"] == axes["ep"] == 1 and data_ranks % max(sizes) == 0:
        found[RANKS_PER_EXCHANGE] = float(max(sizes))
        found[EXCHANGE_GROUPS] = float(data_ranks // max(sizes))
    return {name: size for name, size in found.items() if size not in (1, context.world_size)}


def _scale_left(events: dict[int, list[Event]]) -> float | None:
    """The scale of a GradScaler that did not unscale for every optimizer that stepped; None where it did."""
    scales = set()
    left = False
    for of_rank in events.values():
        unscaled, stepped = (sum(isinstance(event, kind) for event in of_rank) for kind in (AmpUnscale, OptimizerStep))
        left |= unscaled < stepped
        scales |= {event.scale for event in of_rank if isinstance(event, AmpScale)}
    return scales.pop() if left and len(scales) == 1 else None


def step_context(
    run: Run,
    step: int,
    events: dict[int, list[Event]],
    contributions: Contributions,
    objective: str,
    objective_from: str,
) -> StepContext:
    """Gather the numbers that an explanation may use."""
    mesh = infer_mesh(run, events, contributions)
    everything = [event for of_rank in events.values() for event in of_rank]
    backwards = [event for event in everything if isinstance(event, Backward)]
    num_accumulation = 1 + max((event.accumulation_step for event in backwards), default=0)
    num_microbatches = 1 + max((event.microbatch for event in backwards), default=0)
    pipelines = [event for event in everything if isinstance(event, PipelineStep)]
    context = StepContext(
        step=step,
        world_size=run.world_size,
        mesh=mesh,
        objective=objective,
        objective_from=objective_from,
        num_accumulation=num_accumulation,
        num_microbatches=num_microbatches,
        contributions=contributions,
        num_stages=max((event.num_stages for event in pipelines), default=1),
        terms=tuple(sorted({event.term for event in everything if isinstance(event, Loss)} - {"main"})),
        command=tuple(map(str, run.manifest.get("command") or ())),
        scenario=run.manifest.get("scenario"),
    )
    quantities: dict[str, float] = {name: float(degree) for name, degree in mesh.axes.items()}
    quantities["accumulation_steps"] = float(num_accumulation)
    quantities["microbatches"] = float(num_microbatches)
    if contributions.num_tokens:
        quantities["num_tokens"] = float(contributions.num_tokens)
        if more := left_aside(events, contributions):
            quantities[EVALUATED] = float(contributions.num_tokens + more)
    if scale := _scale_left(events):
        quantities[LOSS_SCALE] = scale
    data_ranks = contributions.num_coordinates
    if data_ranks > 1 and data_ranks != run.world_size and prod(mesh.axes[name] for name in DATA_AXES) == 1:
        quantities["data_ranks"] = float(data_ranks)  # no reduction was seen that would tell their axes
    if run.world_size not in {int(value) for name, value in quantities.items() if name in AXIS_NAMES}:
        quantities["world_size"] = float(run.world_size)
    context.quantities = quantities | _unnamed_degrees(context, events)
    return context
