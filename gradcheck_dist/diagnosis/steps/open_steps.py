"""Why a step cannot be judged, or not wholly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from fractions import Fraction
from math import isfinite

import numpy as np

from gradcheck_dist.diagnosis.finding import Coverage
from gradcheck_dist.diagnosis.losses.marked import declared_terms, marked_aside
from gradcheck_dist.diagnosis.norms.step_norms import StepNorms
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.cells import COUNTED_AGAIN, COUNTS_NOTHING, MAX_SPREAD, Held
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import (
    BEFORE,
    CUDA_GRAPHS,
    FUNCTION,
    GATHERED,
    KEPT_BY_OPTIMIZER,
    OWN_OPTIMIZER_PROBE,
    THREADS,
    UNNAMED,
    UPDATED_BETWEEN,
    UPDATED_INSIDE,
    Event,
    Loss,
    LossGradient,
    OptimizerStep,
    PipelineStep,
    StepEnd,
    Unrecorded,
)
from gradcheck_dist.ledger.contributions import UNKNOWN, ContributionKey, Contributions, losses_of_rank, slots_of_rank
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import FORBIDDEN
from gradcheck_dist.wording import numbered, plural

UNCOUNTED = (
    "backward passes that no loss begins, but a gradient that was computed elsewhere (a loss in chunks, another "
    "stage): what they should weigh is not known"
)
WEIGHED_BY_DATA = (
    "the loss weighs the tokens of a pass apart, by the data (advantages, weights of tokens or pairs, a curve): what "
    "each should weigh is not known. gradcheck_dist.mark_loss(weighted_sum, num_tokens), on the way to backward and "
    "before the sum is divided, has that division judged"
)
PARTS = (
    "one pass adds up means over parts of a batch, each divided by its own tokens, so that tokens of a part with fewer "
    "weigh more: right where parts are to weigh alike, and wrong where all tokens are"
)
NOT_FINITE = "are infinite or not a number"
UNREADABLE = "gave nothing that can be read"
UNMADE = "that no recorded backward pass of the step made"
FEW_SAMPLES = "cannot be told from the samples"
OF_THEIR_OWN = "hold parameters of their own alone"
NONE_ASKED_FOR = "none of which was to be recorded"
NO_AUTOGRAD = "no backward pass of autograd's was recorded"
BLIND = "losses went backward, and no gradient of a parameter was seen: not judged"
REPLAYED = "was replayed from a CUDA graph, where no probe sees it: record steps before the capture (`--steps`)"


def no_step(run: Run, coverage: Coverage) -> str:
    """Why a run has no step that could be judged."""
    if any(missing.probe == CUDA_GRAPHS for missing in coverage.probes_missing):
        return f"every backward pass {REPLAYED}"
    passed = max((_unrecorded_alone(trace.events) for trace in run.ranks.values()), default=0)
    if passed:
        return f"training ended after {plural(passed, 'optimizer step')}, {NONE_ASKED_FOR}"
    if any(isinstance(event, OptimizerStep) for trace in run.ranks.values() for event in trace.events):
        return f"optimizers stepped, and {NO_AUTOGRAD}: gradients by torch.func, or by hand, are not followed"
    return "no backward pass was recorded: attach before the training loop, and let it reach a step"


def _unrecorded_alone(events: Sequence[Event]) -> int:
    """How many steps a rank came through in all, where none of them was one to record: these are told when one is
    reached, else at the end, in the last of them."""
    told = [event for event in events if isinstance(event, Unrecorded)]
    passed = sum(event.num_steps for event in told)
    return passed if told and told[-1].step == passed - 1 else 0


def tokens_known(run: Run, data: StepData) -> bool:
    """Whether every missing rank shares its tokens with one that is there; else no expected weight is known."""
    known: set[int] = set()
    if run.axes is not None:
        axes = run.axes
        names = ("dp_replicate", "dp_shard", "cp")
        place = {rank: tuple(axes.coordinates(rank)[name] for name in names) for rank in range(run.world_size)}
        present = {place[rank] for rank in run.ranks}
        known = {rank for rank, coordinate in place.items() if coordinate in present}
    for of_rank in data.events.values():
        for event in of_rank:
            if isinstance(event, PipelineStep) and any(losses_of_rank(data.events.get(r, [])) for r in event.group):
                known |= set(event.group)
    return set(run.missing_ranks) <= known


def not_finite(step: int, norms: StepNorms) -> list[str]:
    """That gradients held infinities or NaN when they were clipped, or else when an optimizer read them."""
    strange = [part for part in norms.parts.values() if part.num_nonfinite]
    if not strange:
        return []
    names = in_short(sorted({part.key[1] for part in strange}))
    ranks = numbered("rank", {part.rank for part in strange})
    number = plural(sum(part.num_nonfinite for part in strange), "element")
    return [
        f"step {step}: gradients of {names} {NOT_FINITE} on {ranks} ({number}): what is measured there is of the "
        "others only. A reduction in a narrow type overflows so, and so does a loss that divides by no tokens"
    ]


def infinite_losses(contributions: Contributions) -> list[str]:
    """Why nothing can be judged where what losses enter with is no number."""
    weights = [one.weight for one in contributions.by_key.values() if one.weight is not None]
    if all(map(isfinite, weights)):
        return []
    return [f"the weights of the losses' tokens {NOT_FINITE}: they are divided by a count that is zero, or overflow"]


def _without(run: Run) -> list[str]:
    """What of the run is not there, or may not be read."""
    told = {
        rank: " ".join(problem for problem in run.problems if f"rank-{rank:05d}" in problem)
        for rank in run.missing_ranks
    }
    return [
        f"the trace of {numbered('rank', ranks)} {what}: "
        f"{'their' if len(ranks) > 1 else 'its'} tokens and gradients are unknown"
        for ranks, what in (
            ([rank for rank, why in told.items() if FORBIDDEN in why], FORBIDDEN),
            ([rank for rank, why in told.items() if why and FORBIDDEN not in why], UNREADABLE),
            ([rank for rank, why in told.items() if not why], "is missing"),
        )
        if ranks
    ]


def why_not(run: Run, data: StepData, contributions: Contributions) -> list[str]:
    """Reasons for which this step cannot be judged, or not wholly."""
    reasons = []
    if run.missing_ranks:
        reasons += _without(run)
    reasons += foreign(run, data)
    if not data.complete:
        reasons.append(_not_reached(data))
    reasons += data.told(KEPT_BY_OPTIMIZER)
    reasons += dict.fromkeys(data.told(GATHERED))
    if replayed(data):
        reasons.append(f"a part of the step {REPLAYED}")
    if alone := passes_unmatched(data):
        reasons.append(
            f"on {numbered('rank', alone)}, no optimizer steps, and other backward passes run than on the ranks where "
            "one does: which tokens from there belong to which step is not known"
        )
    reasons += numbered_apart(data)
    reasons += dict.fromkeys(data.told(THREADS))
    if not contributions.by_key:
        tells = "call gradcheck_dist.mark_loss(loss_sum, num_tokens) where the loss is computed"
        if terms := declared_terms(data):
            tells = (
                f"all that mark_loss declares are terms ({in_short(terms)}): call it without term=... for the main one"
            )
        reasons.append(f"no loss was seen: {marked_aside(data) or tells}")
    counted = [c for c in contributions.by_key.values() if c.num_tokens is not None]
    if 0 < len(counted) < len(contributions.by_key):
        reasons.append("the number of tokens of some contributions is unknown: name it with mark_loss")
    return reasons


def weighed_apart(contributions: Contributions) -> list[str]:
    """Why losses that weigh their tokens apart cannot be judged wholly."""
    apart = [c for c in contributions.by_key.values() if c.spread > MAX_SPREAD]
    if any(c.loss is None or c.loss.reduction == UNKNOWN or (c.gradient and c.gradient.computed) for c in apart):
        return [WEIGHED_BY_DATA]
    if not apart:
        return []
    if all(c.samples is not None and c.samples.parts for c in apart):
        return [PARTS]
    return [
        "tokens of one contribution enter backward with different weights: mark_loss gives each of several losses its "
        "own term, and tells what a sum of weighted tokens counts"
    ]


def _not_reached(data: StepData) -> str:
    own = data.told(OWN_OPTIMIZER_PROBE)
    if own:
        return f"what was read of a step's gradients is not known: {own[0]}"
    return f"step {data.step} did not reach the optimizer on every rank"


def replayed(data: StepData) -> bool:
    """Whether some of the step's gradients, or its optimizer's step, came out of a CUDA graph."""
    return bool(data.told(CUDA_GRAPHS))


def out_of_sight(data: StepData) -> bool:
    """Whether the step's gradients came out of a CUDA graph, are those of several threads that train at once, or were
    read by no optimizer of torch's (inside of the backward pass, or beside one that never steps): whatever is left of
    them says nothing."""
    unseen = {UPDATED_BETWEEN, UPDATED_INSIDE} & set(data.told(OWN_OPTIMIZER_PROBE))
    return replayed(data) or bool(data.told(THREADS)) or bool(unseen)


def passes_unmatched(data: StepData) -> list[int]:
    """Ranks that never step an optimizer in this step and ran other backward passes than those that do: which of their
    tokens belong to it is not known (a parameter server's workers, a rank that died)."""
    stepped = {
        rank for rank, events in data.events.items() if any(isinstance(event, OptimizerStep) for event in events)
    }
    slots = {frozenset(slots_of_rank(data.events[rank])) for rank in stepped}
    if not stepped:
        return []
    return sorted(
        rank
        for rank, events in data.events.items()
        if rank not in stepped and (mine := slots_of_rank(events)) and frozenset(mine) not in slots
    )


def numbered_apart(data: StepData) -> list[str]:
    """Why nothing of a step is judged: ranks of which some stepped an optimizer before their first loss (a rank that
    had no batch and took part with zeros) number it otherwise."""
    before = {
        rank: event.num_before
        for rank, events in data.events.items()
        for event in events
        if isinstance(event, StepEnd) and event.num_before is not None
    }
    if len(set(before.values())) < 2:
        return []
    late = sorted(rank for rank, count in before.items() if count > min(before.values()))
    return [
        f"optimizers stepped on {numbered('rank', late)} before any loss was seen there, and not as often on the "
        "others: this step is another one there, and what was recorded of both does not belong together"
    ]


def leave_unmade_open(verdicts: Sequence[StepVerdict]) -> None:
    """A reason for each step in which an optimizer read what no pass made. What belongs to no module is known from its
    first optimizer step on: of that, later steps tell."""
    known: set[str] = set()
    for verdict in verdicts:
        last = verdict is verdicts[-1]
        names = [name for name in verdict.unmade if last or name in known or not name.startswith(UNNAMED)]
        known.update(verdict.unmade)
        if names:
            verdict.reasons.append(
                f"the optimizer reads a gradient of {in_short(names)} {UNMADE}: "
                "it was computed by hand, is left from an earlier step, or came on a way that no probe follows"
            )


def unmade(data: StepData) -> list[str]:
    """Parameters of an optimizer with a gradient, though no pass on any rank delivered one."""
    found: list[str] = []
    for key, of_rank in data.tracks.items():
        if any(track.leaves for track in of_rank.values()):
            continue
        for rank, track in of_rank.items():
            steps = {
                event.seq
                for event in data.events[rank]
                if isinstance(event, OptimizerStep) and track.param.id in data.params_of(rank, event.params)
            }
            read = [point.values.data for point in track.points if point.seq in steps and point.role == BEFORE]
            if any(np.nan_to_num(values).any() for values in read):
                found.append(key[1])
                break
    return sorted(found)


def unseen(
    held: list[Held], expected: dict[ContributionKey, Fraction], own: dict[int, set[int]] | None = None
) -> list[str]:
    """Contributions whose weight no parameter of a rank shows: what was not seen must not be called right.

    Args:
        own: the data coordinates that concern each rank; None where all do.
    """
    seen: dict[tuple[int, int], set[ContributionKey]] = defaultdict(set)
    for one in held:
        if one.observed is not None and any(one.visible):  # of a shard without a sampled element others tell
            told = {cell.key for cell in one.cells} | {key for key in expected if key[0] in one.elsewhere}
            for rank in one.ranks:
                seen[one.param[0], rank] |= told
    missing = {
        (rank, key)
        for (_, rank), keys in seen.items()
        for key in expected
        if key not in keys and (own is None or key[0] in own.get(rank, ()))
    }
    if not missing:
        return []
    lacking = {rank for rank, _ in missing}
    if _hold_nothing_in_common(held, lacking):
        return [
            f"{numbered('rank', lacking)} {OF_THEIR_OWN}: what others' losses weigh there comes through activations, "
            "if at all, and is not told apart. If they are meant to train one model, broadcast it before the first "
            "step and reduce gradients over all ranks"
        ]
    shown = in_short([f"(data rank {d}, accumulation step {k}, microbatch {m})"
                      for d, k, m in sorted({key for _, key in missing})])  # fmt: skip
    return [f"the weight of contribution {shown} {FEW_SAMPLES}"]


def counted_again(held: list[Held]) -> list[str]:
    """Gradients that optimizers read as sums over ranks, some of whose contributions lie on several of these."""
    names = sorted({one.param[1] for one in held if one.reason == COUNTED_AGAIN})
    return [f"the gradient of {in_short(names)} {COUNTED_AGAIN}"] if names else []


def uncounted(held: list[Held], data: StepData, coordinate: dict[int, int]) -> list[str]:
    """Parameters that get gradients only from passes that hand on a gradient which was computed elsewhere, beside
    others whose losses count: what these weigh tells nothing of them. A pass is such where backward was given a
    gradient, or a function of the program's own. Losses that count nothing by design (a critic's) are known by what
    they are."""
    own_losses = set()
    for rank, events in data.events.items():
        known = {event.loss_id for event in events if isinstance(event, Loss) and not event.op.startswith(FUNCTION)}
        for event in events:
            if isinstance(event, LossGradient) and event.loss_id in known:
                own_losses.add((coordinate.get(rank), event.accumulation_step, event.microbatch))
    weighed = {one.param for one in held if one.cells}
    silent = {
        one.param for one in held if one.reason == COUNTS_NOTHING and own_losses.isdisjoint(one.replay.basis.keys)
    }
    alone = silent - weighed
    if not alone or not weighed:
        return []
    return [
        f"gradients of {plural(len(alone), 'parameter')} ({in_short(sorted(name for _, name in alone))}) come only "
        f"from {UNCOUNTED}"
    ]


def _hold_nothing_in_common(held: Sequence[Held], ranks: Collection[int]) -> bool:
    """Whether several ranks hold no parameter that any other rank holds."""
    holders: dict[ParamKey, set[int]] = defaultdict(set)
    for one in held:
        holders[one.param] |= set(one.ranks)
    return len(ranks) > 1 and all(len(on) == 1 for on in holders.values() if not on.isdisjoint(ranks))


def foreign(run: Run, data: StepData) -> list[str]:
    """Why nothing is known of an optimizer's gradients: it owns tensors that no forward has shown and that are no
    copies of parameters either, while parameters that got gradients belong to no optimizer."""
    ranks = set()
    num = 0
    for rank, events in data.events.items():
        steps = [event for event in events if isinstance(event, OptimizerStep)]
        owned = {param for event in steps for param in data.params_of(rank, event.params)}
        seen = {
            track.param.id
            for of_rank in data.tracks.values()
            if (track := of_rank.get(rank)) is not None and track.leaves
        }
        params = run.ranks[rank].params
        strange = sum(params[param].name.startswith("unnamed.") for param in owned - seen if param in params)
        if strange and seen - owned:
            ranks.add(rank)
            num = max(num, strange)
    if not ranks:
        return []
    return [
        f"the optimizer on {numbered('rank', ranks)} owns what is neither a parameter of the model nor a copy of "
        f"one as it was first seen ({plural(num, 'tensor')}): what it reads is not known"
    ]
