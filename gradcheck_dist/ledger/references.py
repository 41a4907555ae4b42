"""References: whole copies of a model, beside it, that a program trains or differentiates only to compare the two.

Who doubts a gradient computes it again in the same program: a copy of the model, which no wrapper touches, gets all
tokens of the step on one rank, or on each, and its gradients are laid beside those of the model. To a ledger that is a
model which nobody reduces, on batches that ranks share, or one that no optimizer reads. So it is left out: its
parameters, its passes, and what its own optimizer does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from gradcheck_dist.events import Backward, OptimizerStep, Param, Reduce
from gradcheck_dist.ledger.counted_losses import Counted, count, losses_by_pass
from gradcheck_dist.ledger.emptied_references import Slots, before_emptied, emptied_references
from gradcheck_dist.ledger.repeated_batches import same_gradients
from gradcheck_dist.ledger.tracks import ParamKey, Slot, param_key, step_data
from gradcheck_dist.ledger.without_passes import without_passes
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import plural

MOST_SITES = 3
"""How many places are shown."""


@dataclass(frozen=True)
class References:
    """A run without the references of one step, their parameters, and what was left out, in words."""

    run: Run
    params: frozenset[ParamKey] = frozenset()
    remarks: tuple[str, ...] = ()


@dataclass(eq=False)
class _Model:
    """Parameters of one rank that its passes reach together, and these passes. `spread`: ranks share the work on it
    (they reduce its gradients, hold shards of it, or a stage each). `optimizers` are the sets of parameters that
    optimizers step by which own some of them."""

    rank: int
    params: dict[int, Param]
    slots: set[Slot] = field(default_factory=set)
    sites: set[str] = field(default_factory=set)
    spread: bool = False
    optimizers: set[int] = field(default_factory=set)

    @property
    def in_order(self) -> list[Param]:
        return [param for _, param in sorted(self.params.items())]


def without_references(run: Run, step: int) -> References:
    """The run as the engine is to read it in one step."""
    found = _without_models(run, step)
    return without_emptied(found, step, {rank: before_emptied(trace, step) for rank, trace in found.run.ranks.items()})


def without_emptied(found: References, step: int, gone: Slots) -> References:
    """The same, and without passes of which nothing was left, where these are references."""
    emptied = emptied_references(found.run, step, gone)
    if not emptied:
        return found
    sites = {
        event.site.short
        for rank, slots in emptied.items()
        for event in found.run.ranks[rank].events
        if isinstance(event, Backward) and event.step == step and event.site is not None
        if (event.accumulation_step, event.microbatch) in slots
    }
    ranks = {
        rank: without_passes(trace, step, emptied[rank]) if rank in emptied else trace
        for rank, trace in found.run.ranks.items()
    }
    remark = (
        f"the gradients of the passes{_at(sites)} were emptied before others came, and are those of all that these are "
        "given: taken for a reference, and left out"
    )
    return References(replace(found.run, ranks=ranks), found.params, (*found.remarks, remark))


def _without_models(run: Run, step: int) -> References:
    models = {rank: list(_models(trace, step)) for rank, trace in run.ranks.items()}
    found = _references(run, step, models) if any(len(of_rank) > 1 for of_rank in models.values()) else {}
    if not found:
        return References(run)
    ranks = dict(run.ranks)
    for rank, of_rank in found.items():
        slots = {slot for model in of_rank for slot in model.slots}
        gone = {id for model in of_rank for id in model.params}
        ranks[rank] = without_passes(run.ranks[rank], step, slots, gone)
    params = {param_key(param) for of_rank in found.values() for model in of_rank for param in model.params.values()}
    sites = {site for of_rank in found.values() for model in of_rank for site in model.sites}
    remark = (
        f"the passes{_at(sites)} reach a copy of the model alone ({plural(len(params), 'parameter')}), with all that "
        "the step's other passes are given: taken for a reference that the model is compared with, and left out"
    )
    return References(replace(run, ranks=ranks), frozenset(params), (remark,))


def _at(sites: Iterable[str]) -> str:
    shown = sorted(sites)
    more = f" and {len(shown) - MOST_SITES} more places" if len(shown) > MOST_SITES else ""
    return f" at {', '.join(shown[:MOST_SITES])}{more}" if shown else ""


def _models(trace: RankTrace, step: int) -> Iterator[_Model]:
    """The sets of a rank's parameters that no pass reaches together."""
    events = [event for event in trace.events if event.step == step]
    reached: dict[int, list[Backward]] = defaultdict(list)
    for event in events:
        if isinstance(event, Backward) and event.params is not None and trace.param_sets.get(event.params):
            reached[event.params].append(event)
    joined: list[tuple[set[int], list[Backward]]] = []
    for param_set, passes in reached.items():
        ids, own = set(trace.param_sets[param_set]), list(passes)
        apart = []
        for others, theirs in joined:
            if ids.isdisjoint(others):
                apart.append((others, theirs))
            else:
                ids, own = ids | others, own + theirs
        joined = [*apart, (ids, own)]
    for ids, passes in joined:
        model = _Model(trace.rank, {id: trace.params[id] for id in ids if id in trace.params})
        model.slots = {(one.accumulation_step, one.microbatch) for one in passes}
        model.sites = {one.site.short for one in passes if one.site is not None}
        model.spread = any(param.placements or param.stage is not None for param in model.params.values())
        for event in events:
            if isinstance(event, Reduce | OptimizerStep) and not ids.isdisjoint(trace.param_sets.get(event.params, ())):
                if isinstance(event, OptimizerStep):
                    model.optimizers.add(event.params)
                else:
                    model.spread = True
        yield model


def _references(run: Run, step: int, models: Mapping[int, list[_Model]]) -> dict[int, list[_Model]]:
    """The models of each rank that are references."""
    every = [model for of_rank in models.values() for model in of_rank]
    judged = [model for model in every if model.spread] or _seems_shared(run, step, every)
    # Beside one model that an optimizer steps and of which nobody saw that ranks share it, what none steps.
    stepped = bool(judged)
    judged = judged or [model for model in every if model.optimizers]
    stepped_with = {(model.rank, one) for model in judged for one in model.optimizers}
    shared = _each_once(judged)
    counts = _counts(run, step, judged)
    given_each = {count(_losses(run, step, model)) for model in judged}
    found: dict[int, list[_Model]] = defaultdict(list)
    uncounted = False
    for model in every:
        shares_optimizer = any((model.rank, one) in stepped_with for one in model.optimizers)
        if (
            model in judged
            or shares_optimizer
            or (model.optimizers and not stepped)
            or not _is_whole_of(model.in_order, shared)
        ):
            continue
        own = count(_losses(run, step, model))
        counted = own is not None and bool(counts)
        # A second model that was forgotten by its optimizer is given what each rank is, too.
        as_each = own in given_each and _have_one_shape(model.in_order, shared)
        if (own in counts or not counted) and ((counted and not as_each) or _began_so(model.in_order, shared)):
            found[model.rank].append(model)
            uncounted |= not counted
    if uncounted and not _alike(run, step, found):
        return {}
    return dict(found)


def _seems_shared(run: Run, step: int, every: Iterable[_Model]) -> list[_Model]:
    """Of several models that optimizers step, all by themselves as far as was seen, that one which is given on all
    ranks together what another one is given on each, or of which each rank has a part."""
    named: dict[frozenset[ParamKey], list[_Model]] = defaultdict(list)
    for model in every:
        if model.optimizers:
            named[frozenset(map(param_key, model.params.values()))].append(model)

    def are_whole(others: list[_Model], own: list[_Model], given: int) -> bool:
        counts = {count(_losses(run, step, model)) for model in others}
        parts = all(_are_parts(own[0].in_order, model.in_order) for model in others)
        return counts == {given} or (parts and counts == {count(_losses(run, step, own[0]))})

    for own in named.values():
        given = count(one for model in own for one in _losses(run, step, model))
        others = [models for models in named.values() if models is not own]
        if len(own) > 1 and given is not None and any(are_whole(models, own, given) for models in others):
            return own
    return []


def _each_once(judged: Iterable[_Model]) -> list[Param]:
    """The parameters of a model that ranks share."""
    params: dict[ParamKey, Param] = {}
    for model in judged:
        for param in model.in_order:
            params.setdefault(param_key(param), param)
    return list(params.values())


def _is_whole_of(whole: Sequence[Param], shared: Sequence[Param]) -> bool:
    """Whether parameters have the shapes of a whole model of which ranks hold `shared`."""
    shapes = [Counter(one.shape for one in params) for params in (whole, shared)]
    return shapes[0] == shapes[1] or _are_parts(shared, whole)


def _have_one_shape(whole: Sequence[Param], shared: Sequence[Param]) -> bool:
    """Whether ranks hold each parameter as it is in a whole model, so that first values compare."""
    return not any(one.placements for one in shared) and not _are_parts(shared, whole)


def _are_parts(parts: Sequence[Param], whole: Sequence[Param]) -> bool:
    """Whether tensors without a layout are those of a whole model, some of them one of equal parts along one dimension,
    of as many parts each."""
    if any(part.placements for part in parts):
        return False
    mine, theirs = (Counter(one.shape for one in params) for params in (parts, whole))
    cut, full = mine - theirs, theirs - mine
    pairs = [(part, one) for part in cut for one in full if _is_cut(part, one)]
    paired = {part for part, _ in pairs} == cut.keys() and {one for _, one in pairs} == full.keys()
    ratios = {prod(one) // prod(part) for part, one in pairs}
    sizes = [sum(prod(shape) * num for shape, num in shapes.items()) for shapes in (cut, full)]
    return bool(pairs) and paired and cut.total() == full.total() and any(sizes[0] * one == sizes[1] for one in ratios)


Shape = tuple[int, ...]


def _is_cut(part: Shape, whole: Shape) -> bool:
    unlike = [(mine, full) for mine, full in zip(part, whole, strict=False) if mine != full]
    return len(part) == len(whole) and len(unlike) == 1 and unlike[0][0] > 0 and unlike[0][1] % unlike[0][0] == 0


def _losses(run: Run, step: int, model: _Model) -> list[Counted]:
    by_pass = losses_by_pass(run, step, model.rank)
    return [loss for slot, losses in by_pass.items() if slot in model.slots for loss in losses]


def _counts(run: Run, step: int, judged: Iterable[_Model]) -> set[int]:
    """What all losses of a model that ranks share come to: of all ranks, or those with the same labels once."""
    every = [losses for model in judged if (losses := _losses(run, step, model))]
    once = {tuple(losses): losses for losses in every if all(labels is not None for labels, _ in losses)}
    sums = (count(one for losses in many for one in losses) for many in (every, once.values()))
    return {number for number in sums if number}


def _began_so(own: Sequence[Param], shared: Sequence[Param]) -> bool:
    starts = Counter((param.shape, param.start) for param in own)
    return any(param.start is not None for param in own) and starts == Counter((one.shape, one.start) for one in shared)


def _alike(run: Run, step: int, found: Mapping[int, list[_Model]]) -> bool:
    """Whether references got the same gradients wherever they are."""
    ids = {(rank, id) for rank, of_rank in found.items() for model in of_rank for id in model.params}
    for of_rank in step_data(run, step).tracks.values():
        mine = [track for rank, track in of_rank.items() if (rank, track.param.id) in ids]
        if any(not same_gradients(mine[0], other) for other in mine[1:]):
            return False
    return True
