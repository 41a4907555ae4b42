"""Which exchanges of activations came back wrong, which of them are findings, and which leave a verdict open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from gradcheck_dist.diagnosis.audits.whole_shares import (
    UNDOES,
    alone_before_one_loss,
    has_values,
    losses_differ,
    share_in_front,
    share_of_whole,
)
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.events import HANDED_ON, Event, Exchange, Loss, LossGradient, LossTerm
from gradcheck_dist.ledger.combined_copies import leads_on_unseen, summed_copies, sums_alike
from gradcheck_dist.ledger.contributions import UNKNOWN, Contributions
from gradcheck_dist.ledger.exchanges import (
    APART,
    COPY,
    GATHER,
    MOVE,
    SCATTER,
    SLICE,
    SUM,
    SWAP,
    Passed,
    passed,
)
from gradcheck_dist.ledger.tracks import StepData, Track

VERIFY = "`gradcheck run --verify` compares"
BY_VERIFY = f"{VERIFY} with central differences whether the gradient is right"


@dataclass(frozen=True)
class Faulty:
    """An exchange whose backward is not its forward's transpose. `shared`: its ranks have one loss, on the same
    tokens; `unlike_losses`: on the same tokens each has another one. `share`: what an average over the ranks leaves of
    a loss's gradient, where each computes it whole."""

    passed: Passed
    shared: bool
    share: float | None = None
    unlike_losses: bool = False

    @property
    def name(self) -> str:
        first = self.passed.first
        return first.function or f"{first.collectives[0]} without a function"

    @property
    def where(self) -> str:
        site = self.passed.first.site
        return site.short if site is not None else "line unknown"

    @property
    def written(self) -> tuple[object, ...]:
        """Equal for applications that are written once."""
        first = self.passed.first
        at = first.defined_at or first.site
        return (first.function, at and (at.file, at.line))

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for applications that are wrong alike and written once."""
        return (*self.written, self.passed.outcome, f"{self.passed.factor:.4g}")


@dataclass
class Faults:
    found: list[Faulty] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def could_judge(data: StepData) -> bool:
    return any(isinstance(event, Exchange) for of_rank in data.events.values() for event in of_rank)


def faults(data: StepData, contributions: Contributions, weights_right: bool) -> Faults:
    """The exchanges of a step that came back wrong.

    What stands between a loss and the root is part of the weight at the loss, and judged with that. A multiple accuses
    only where all weights came out right and no other exchange undoes it: it may be one half of a convention (losses
    that ranks add up, experts whose gradients are divided on the way). Of ranks with losses of their own any may be
    meant to count all or the mean of them.
    """
    result = Faults()
    scaled: list[Faulty] = []
    scalers: list[float] = []  # of functions that hand their input on and communicate with nobody
    found = list(passed(data.events))
    unlike = {one.ranks for one in found if one.forward in (SUM, SCATTER)}  # whose inputs are known to differ
    for one in found:
        if _behind_the_loss(data, one):
            continue
        share = share_of_whole(data, contributions, one)
        if share is None:
            share = share_in_front(data, contributions, one, found)
        if share is not None:
            fault = Faulty(one, False, share)
            if abs(share - 1) <= UNDOES or not weights_right:
                continue
            in_place = not one.first.function and one.outcome != "kept"  # statistics, for which that may be meant
            own_term = losses_differ(data, one) and _has_terms(data, one)  # a coefficient may make up for it
            others = any(_answers_for(other, fault) for other in found)
            if in_place or one.first.stopped or own_term or others or _inside_a_loss(data, one):
                result.reasons.append(f"{of_whole(fault)}: {BY_VERIFY}")
            else:
                result.found.append(fault)
            continue
        if one.outcome == "right":
            continue
        if len(one.ranks) == 1:
            scalers.append(one.factor)
            continue
        if one.forward in (COPY, GATHER) and one.whole and one.outcome == "scaled":
            sums = one.ranks in unlike and not (leads_on_unseen(data.events, one) or sums_alike(data.events, one))
            if not sums and not alone_before_one_loss(data, one):
                continue  # shards that were drawn from one seed: summands are as alike as whole gradients
        apart = losses_differ(data, one) and one.outcome != "unlike"  # of which that is a consequence
        one_batch = len({contributions.coordinate.get(rank, rank) for rank in one.ranks}) == 1
        shared = one_batch and not apart
        fault = Faulty(one, shared, unlike_losses=one_batch and apart)
        if one.outcome == "kept":
            if apart and one.first.stopped:
                result.reasons.append(
                    f"what {fault.name} ({fault.where}) gathers was detached, and each rank put its own part back and "
                    "has a loss of its own: what others' losses want of it is lost, which is meant for constants "
                    f"(negatives of a contrastive loss) and wrong for keys and values of one sequence: {BY_VERIFY}"
                )
            elif apart:
                result.found.append(fault)
            elif weights_right and not shared and sum(one.first.input_counts) > 1 and not has_values(data, one):
                result.reasons.append(
                    f"what {fault.name} ({fault.where}) gathers has no gradient, and each rank put its own part back: "
                    "where all compute one whole loss on it, which nothing tells here, an average over the "
                    f"{len(one.ranks)} ranks leaves x {1 / len(one.ranks):.6g} of its gradient: {BY_VERIFY}"
                )
        elif one.outcome == "lost":
            result.reasons.append(f"no gradient comes back through {fault.name} ({fault.where}): {BY_VERIFY}")
        elif one.outcome == "scaled":
            # Of what is gathered a mean may be meant where all of the loss depends on it, and nothing else shows.
            if (
                shared
                or one.forward in (SWAP, MOVE, SCATTER, SLICE)
                or not _is_degree(one)
                or _is_mean_of_gathered(one)
            ):
                scaled.append(fault)
        elif (one.outcome == "unlike" or one.first.operation == HANDED_ON) and not shared:
            continue  # of data ranks the first may be meant, and the second be summed at the parameters: weights tell
        elif one.outcome == "own" and not shared and not one.first.function:
            result.reasons.append(
                f"{fault.name} at {fault.where} changes a tensor of the graph in place and has no gradient, so that "
                f"each rank's input learns from its own loss alone (meant for statistics, wrong for a sum): {BY_VERIFY}"
            )
        else:
            result.found.append(fault)
    factors = {fault.place: fault.passed.factor for fault in scaled}
    pairs = combinations([*factors.values(), *set(scalers)], 2)
    undone = any(abs(mine * theirs - 1) < UNDOES for mine, theirs in pairs)
    for fault in scaled:
        known = fault.shared or fault.passed.forward in (SWAP, MOVE)
        if weights_right and known and not undone and not _inside_a_loss(data, fault.passed):
            result.found.append(fault)
        else:
            result.reasons.append(
                f"gradients come back through {fault.name} ({fault.where}) x {fault.passed.factor:.6g} of the "
                f"transpose of its forward, which another line may make up for: {BY_VERIFY}"
            )
    result.reasons += _summed_copies(data)
    result.reasons = list(dict.fromkeys(result.reasons))
    return result


def _answers_for(other: Passed, fault: Faulty) -> bool:
    """Whether a share of a whole loss's gradient comes to another function of the same ranks in front, whose backward
    makes up for what is missing, or is wrong in a way that is no number."""
    one = fault.passed
    if other.ranks != one.ranks or _place(other) >= _place(one) or _place(other)[:2] != _place(one)[:2]:
        return False
    if other.outcome == "scaled":
        return abs(other.factor * (fault.share or 0.0) - 1) <= UNDOES
    return other.outcome == "other"


def _place(one: Passed) -> tuple[int, int, int]:
    first = one.first
    return (first.accumulation_step, first.microbatch, first.index)


def _summed_copies(data: StepData) -> Iterator[str]:
    """What sums over ranks what they hold alike: words for each line that does."""
    for events in summed_copies(data.events):
        one = Passed(events, SUM, "right")
        if not _behind_the_loss(data, one):
            fault = Faulty(one, shared=True)
            yield (
                f"{fault.name} ({fault.where}) sums what all {len(one.ranks)} ranks hold alike already, which "
                f"others of their sums do not: x {len(one.ranks)} of it goes on, and the gradient that comes back is "
                "that of one of them. If these are summands of shards that were drawn from one seed, that is right; "
                f"else it is a sum too many: {BY_VERIFY}"
            )


def makes_up_for(case: Case, data: StepData) -> str | None:
    """Why a factor may be right: the sum of whole gradients on the way to these parameters multiplies by as much.

    One loss that all ranks compute, divided by their number, under an all-reduce that sums in backward too: in front of
    that a weight at the loss is not what arrives. There lie shards, copies whose gradients are summands, or whatever
    the input was computed from of a function that sums what arrives whole on each of its ranks. Or one loss that all
    compute on what they gathered, times their number: each rank's gradient is its own share alone.
    """
    if case.pattern.kind != "uniform":
        return None
    near = max(UNDOES, case.pattern.tolerance)
    of_leaves: dict[int, tuple[Faulty, set[int]]] = {}
    exchanges = list(passed(data.events))
    for one in exchanges:
        share = share_of_whole(data, case.context.contributions, one)
        if share is not None:
            undoes = abs(share * case.pattern.factor - 1) <= near and abs(share - 1) > near
            if undoes and all(are_parts(data.tracks[held.param], one.ranks) for held in case.held):
                return f"{of_whole(Faulty(one, False, share))}; what enters at the loss makes up for that: {BY_VERIFY}"
            continue
        if one.outcome != "scaled" or _behind_the_loss(data, one):
            continue  # what a loss weighs has what lies behind it
        left, added = one.factor * case.pattern.factor, case.context.contributions.losses_per_pass
        if min(abs(left - 1), abs(left / added - 1) if added else 1.0) > near:
            continue
        if one.first.of_leaf:
            (rank,) = one.ranks
            ids = data.params_of(rank, one.first.params)
            of_leaves.setdefault(rank, (Faulty(one, shared=True), set()))[1].update(ids)
            continue
        parts = all(are_parts(data.tracks[held.param], one.ranks) for held in case.held)
        if parts or (one.whole and _all_in_front(case, data, one, exchanges)):
            fault = Faulty(one, shared=True)
            return (
                f"what arrives at {'shards, or as summands,' if parts else 'these parameters'} is x "
                f"{case.pattern.factor:.6g} as it enters at the loss, and gradients come back through {fault.name} "
                f"({fault.where}) x {one.factor:.6g}, which makes up for it in front of that"
                f"{_but_for_losses(left)}: {BY_VERIFY}"
            )
    return _made_up_at_use(case, data, of_leaves)


def _but_for_losses(left: float) -> str:
    """What is left of a factor where several losses of one pass are added up, in words."""
    if abs(left - 1) <= UNDOES:
        return ""
    return f", but for x {left:.6g}, as many as each backward pass adds up losses, which may be tasks of their own"


def _all_in_front(case: Case, data: StepData, one: Passed, exchanges: list[Passed]) -> bool:
    """Whether what an exchange is given was computed from all parameters of a case, on each of its ranks."""
    in_front = [other for other in exchanges if _place(other)[:2] == _place(one)[:2] and _place(other) <= _place(one)]
    used: dict[int, set[int]] = defaultdict(set)
    for other in in_front:
        for rank, event in other.events.items():
            used[rank].update(data.params_of(rank, event.params))
    return all(
        rank in one.events and track.param.id in used[rank]
        for held in case.held
        for rank, track in data.tracks[held.param].items()
    )


def _made_up_at_use(case: Case, data: StepData, of_leaves: Mapping[int, tuple[Faulty, set[int]]]) -> str | None:
    """The same, where all of a case's parameters are used through functions that multiply their gradients: by rank one
    of these, and the ids of such parameters."""
    for held in case.held:
        for rank, track in data.tracks[held.param].items():
            if rank not in of_leaves or track.param.id not in of_leaves[rank][1]:
                return None
    fault, _ = of_leaves[case.held[0].rank]
    return (
        f"these parameters are used through {fault.name} ({fault.where}), whose backward multiplies their gradients by "
        f"{fault.passed.factor:.6g}: x {case.pattern.factor:.6g} of the weight makes up for it: {BY_VERIFY}"
    )


def are_parts(of_rank: Mapping[int, Track], ranks: tuple[int, ...]) -> bool:
    """Whether no two of the ranks got one gradient of a parameter."""
    tracks = [of_rank[rank] for rank in ranks if rank in of_rank]
    slots = set.intersection(*(set(track.leaves) for track in tracks)) if tracks else set()
    return all(_unlike(one.leaves[slot][1].data, other.leaves[slot][1].data)
               for slot in slots for one, other in combinations(tracks, 2))  # fmt: skip


def _unlike(mine: np.ndarray, theirs: np.ndarray) -> bool:
    both = np.isfinite(mine) & np.isfinite(theirs)
    size = max(float(np.linalg.norm(mine[both])), float(np.linalg.norm(theirs[both])))
    return float(np.linalg.norm(mine[both] - theirs[both])) >= APART * size


def _has_terms(data: StepData, one: Passed) -> bool:
    """Whether a term that counts nothing enters backward in the pass of an exchange."""
    return any(
        isinstance(event, LossTerm)
        and (event.accumulation_step, event.microbatch) == (one.first.accumulation_step, one.first.microbatch)
        for rank in one.ranks
        for event in data.events[rank]
    )


def of_whole(fault: Faulty) -> str:
    """What becomes of the gradient of a loss that every rank computes whole, in words."""
    one = fault.passed
    if one.forward == SLICE:
        return (
            f"every rank computes the whole loss on what is gathered behind {fault.name} ({fault.where}), and backward "
            f"gives its input x {fault.share:.6g} of that loss's gradient, the same on all {len(one.ranks)} ranks, "
            "which an average leaves as it is"
        )
    times = "its own share" if abs(one.factor - 1) <= UNDOES else f"x {one.factor:.6g} of its own share"
    return (
        f"every rank computes the whole loss on what {fault.name} ({fault.where}) gave, and backward gives its input "
        f"{times} of that loss's gradient: an average over the {len(one.ranks)} ranks leaves x {fault.share:.6g} of "
        "the gradient to all in front"
    )


def _is_degree(one: Passed) -> bool:
    """Whether ranks with losses of their own were averaged or counted all."""
    size = len(one.ranks)
    whole = one.whole and one.forward in (SUM, GATHER)
    return abs(one.factor * size - 1) < UNDOES or (whole and abs(one.factor / size - 1) < UNDOES)


def _is_mean_of_gathered(one: Passed) -> bool:
    return one.forward == GATHER and one.factor < 1


def _slots(events: Iterable[Event], one: Exchange) -> list[tuple[LossGradient, bool]]:
    """The losses of an exchange's pass that count something, and whether they were reached before it."""
    counted = {event.loss_id for event in events if isinstance(event, Loss) and event.reduction != UNKNOWN}
    return [
        (event, event.seq < one.seq)
        for event in events
        if isinstance(event, LossGradient)
        and event.loss_id in counted
        and (event.accumulation_step, event.microbatch) == (one.accumulation_step, one.microbatch)
    ]


def _behind_the_loss(data: StepData, one: Passed) -> bool:
    """Whether the exchange came between the losses of its pass and the root."""
    found = [_slots(data.events[rank], event) for rank, event in one.events.items()]
    return any(of_rank and not any(before for _, before in of_rank) for of_rank in found)


def _inside_a_loss(data: StepData, one: Passed) -> bool:
    """Whether the pass has a loss that nobody could count, and the exchange may be a part of it."""
    unknown: dict[int, bool] = defaultdict(bool)
    for rank, event in one.events.items():
        has_loss = any(isinstance(other, LossGradient) for other in data.events[rank])
        unknown[rank] = has_loss and not _slots(data.events[rank], event)
    return any(unknown.values())
