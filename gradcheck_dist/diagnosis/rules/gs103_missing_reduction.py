"""A gradient was never combined over the ranks that should share it.

## What it does
Finds contributions that never reached a rank that holds the parameter: other ranks' tokens weigh nothing there, the
own rank's keep the weight that they had before the reduction that did not come, or whose result was left aside: in a
copy that nobody wrote back to `.grad`, on its way, as nobody waited for it, on the one rank that gathered it, or in a
communication hook that returns what it was given. So it finds optimizers that step in hooks on parameters, in front of
their wrapper's reduction, and a wrapper whose reduction changed nothing: a model that is moved or converted once it is
wrapped loses the wrapper's hooks.

## Why it matters
Every rank now trains its own model on its own data. Replicas drift apart, each prints a plausible norm and loss, and
the checkpoint keeps one of them. Where parameters are averaged instead (local SGD, DiLoCo), or an optimizer combines
momentum or updates in its own step, which is seen when it happens, nobody is accused.

## Example
    for i, microbatch in enumerate(microbatches):
        sync = i != len(microbatches) - 1                 # negated: the last backward must reduce
        with contextlib.nullcontext() if sync else ddp.no_sync():
            loss(ddp(microbatch)).backward()

## Fix
Make the last backward of the step reduce, for forward and backward alike; compute gradients through the wrapped
module (not through `module.module` or torch.autograd.grad); do not list a trained parameter as ignored. Call backward()
once behind each forward: DDP reduces in the first one alone. Where lines of the program reduce, let them take every
parameter, and run behind the last backward.

## References
- karpathy/build-nanogpt#30; modelscope/FunASR#3472; pytorch/pytorch#144530; transformers 4.46.2 (measured).
- Without its hooks: pytorch/pytorch#104336; Lightning-AI/pytorch-lightning#17937.
- Lightning-AI/pytorch-lightning#4916. Unverified: huggingface/transformers#34645.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.causes.alone import divides_alone, is_alone, reduced_alone
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.places import kind_of
from gradcheck_dist.diagnosis.causes.unsynced import syncing, unsynced, why_unsynced
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.open_cases.parted_heads import undoing_gathers
from gradcheck_dist.diagnosis.weights.cells import Cell, Held, weighs_nothing
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.events import AFTER, BEFORE, DATA_PARALLEL, OWN_OPTIMIZER, Backward, Event, OptimizerStep, Reduce
from gradcheck_dist.ledger.param_updates import moved_alike
from gradcheck_dist.ledger.reductions import is_partial, nominal_factor
from gradcheck_dist.ledger.tracks import ParamKey, Track
from gradcheck_dist.wording import numbered, plural

CODE = "GS103"
NAME = "missing-reduction"
MOST_GROUPS = 4
"""How many groups of ranks are shown."""


def triggered(context: StepContext) -> bool:
    return context.contributions.num_coordinates > 1


def judge(case: Case) -> Answer | None:
    if case.context.contributions.num_coordinates < 2:
        return None
    if case.culprit.unheard:
        return _left_out(case)
    if (hook := _returned_by(case)) is not None:
        return Answer(
            explanation=f"Other ranks' contributions never reach this gradient: the communication hook {hook} reduces "
            f"it, and what it returns is what it was given ({case.pattern.text}).",
            fix="Let the hook return what its reduction brought, or copy that into the bucket before it returns.",
            culprit=replace(case.culprit, unrecorded=False, before=None, factor=None),
        )
    if _did_nothing(case):
        return Answer(
            explanation="Other ranks' contributions never reach this gradient: the reduction that its wrapper was to "
            f"do in this backward left it as it was ({case.pattern.text}). Most likely its hooks are not called: "
            "parameters that are moved to another device or type, or replaced, once they are wrapped lose them.",
            fix="Move the model, convert it and replace its parameters before it is wrapped, or wrap it anew.",
        )
    if not case.culprit.absent:
        return None
    foreign = [cell for held, cell in case.cells if not cell.right and _is_foreign(case, held.rank, cell.key[0])]
    came = [cell for cell in foreign if abs(cell.ratio) > max(1e-3, cell.margin)]
    foreign = [cell for cell in foreign if abs(cell.ratio) <= max(1e-3, cell.margin)]
    if not foreign or (came and case.pattern.kind != "zeroed"):
        return None  # what did come is off by one factor, that of an average over all ranks
    if all(_arrived_in_part(held, cell) for held, cell in case.cells if not cell.right):
        return None  # the other ranks were heard; what is missing is a summand of theirs (GS703)
    steps = sorted({cell.key[1] for cell in foreign})
    which = f"of {numbered('accumulation step', steps)} " if len(steps) < case.context.num_accumulation else ""
    sync = getattr(case.event, "sync", None)
    not_told = sync is not False and not unsynced(case.event)
    why = "" if not_told else f" (the wrapper did not reduce in this pass: {why_unsynced(case.event)})"
    others = [cell for held in case.held for cell in held.cells if _is_foreign(case, held.rank, cell.key[0])]
    reduced = any(not is_alone(event) for held in case.held for event in _reductions(held))
    what = "no reduction over these ranks" if any(map(_reductions, case.held)) else "no reduction"
    apart = (
        " No gradient was reduced in this step: where ranks are meant to train apart and average their parameters "
        "every few steps (local SGD, DiLoCo), that is right."
        if case.everywhere
        and not reduced
        and case.pattern.factor
        and all(abs(cell.ratio) <= max(1e-3, cell.margin) for cell in others)
        else " They began with the same values on these ranks, as copies do; heads or experts of one rank alone begin "
        "with values of their own."
        if not case.everywhere and not reduced
        else ""
    )
    if (aside := _left_aside(case)) is not None:
        text = case.pattern.text
        return Answer(
            explanation="Gradients were reduced, and the result is not in them: what is read after the reduction is, "
            f"bit by bit, what was there before it. Other ranks' contributions {which}never reach it ({text}).",
            fix="Write the reduced values back into .grad before the optimizer steps (param.grad.copy_(...); a flat "
            "copy piece by piece), and wait() for reductions that are asynchronous.",
            culprit=replace(case.culprit, kind="reduce", event=aside),
        )
    if (idle := _idle_hook(case)) is not None:
        return Answer(
            explanation=f"Other ranks' contributions {which}never reach this gradient ({case.pattern.text}): the "
            f"communication hook {idle.hook} was not seen to reduce, and leaves it as it was.",
            fix="Let the hook all-reduce its bucket and return the result (noop_hook is for measuring alone), or "
            "reduce the gradients by hand (dist.all_reduce) behind the last backward.",
            culprit=replace(case.culprit, kind="reduce", event=idle),
        )
    if (alone := reduced_alone(case.held)) and _beside(case) is None:
        divides = max(map(divides_alone, alone))
        and_divides = f", and divides by {divides:g} in each pass as if more had joined" if divides > 1 else ""
        return Answer(
            explanation=f"Other ranks' contributions {which}never reach this gradient ({case.pattern.text}): what "
            f"reduces it joins this rank alone{and_divides}.",
            fix="Reduce over all ranks that hold this parameter and evaluate other tokens: give the wrapper a group or "
            "mesh of these. FSDP1's HYBRID_SHARD does not reduce over replicas whose shards are of one rank: take "
            "NO_SHARD, DDP, or FULL_SHARD over all of them.",
            culprit=replace(case.culprit, kind="reduce", event=alone[-1]),
        )
    if (ahead := _stepped_ahead(case)) is not None:
        return Answer(
            explanation=f"Other ranks' contributions {which}never reach this gradient ({case.pattern.text}): the "
            "optimizer steps inside of the backward pass, before the wrapper has reduced what it reads.",
            fix="Step behind backward(), or in a communication hook behind its reduction; hooks on parameters see the "
            "rank's own gradient below DDP (below FSDP2 they see what is reduced).",
            culprit=replace(case.culprit, kind="optimizer_step", event=ahead),
        )
    whole = reduced and all(map(_reductions, case.held))
    lacking = _other_group(case, {cell.key[0] for cell in foreign}) if whole else None
    beside = _beside(case) if not whole and not case.whole else None
    text = case.pattern.text
    text = f"Weights are {text}" if text.startswith("x ") else f"{text[0].upper()}{text[1:]}"
    by = f" by {case.skipped:.6g}" if case.skipped is not None else ""
    besides = f" What reduces other gradients also multiplies them{by}; these are left as they were." * bool(case.whole)
    over_few = _last_reduction(case) if lacking else None
    at = over_few if over_few is not None and over_few.wrapper is None else beside
    others_of = (
        "Contributions of ranks that the reduction leaves out"
        if lacking
        else f"Other ranks' contributions{f' {which}'.rstrip()}"
    )
    others_are = f", and {beside.site.short} reduces other gradients" if beside and beside.site else ""
    return Answer(
        explanation=f"{others_of} never reach this gradient: {what} followed the last "
        f"backward{why}{others_are}. {text}.{besides}{apart}{lacking or ''}",
        fix=_mended(case, lacking, beside),
        culprit=None if at is None else replace(case.culprit, kind="reduce", event=at),
    )


def _beside(case: Case) -> Reduce | None:
    """The program's own line that reduces other gradients; None where there is none."""
    event = case.culprit.missing
    return event if isinstance(event, Reduce) and event.wrapper is None else None


def _mended(case: Case, lacking: str | None, beside: Reduce | None) -> str:
    """What lets the reduction follow that did not; `lacking` tells of one over too few ranks, `beside` is that of other
    gradients."""
    reductions, holders = [_reductions(held) for held in case.held], _holders(case)
    over = " | ".join(",".join(map(str, sorted(ranks))) for ranks in sorted(holders, key=min))
    if all(found and is_partial(found[-1]) for found in reductions):
        return (
            "Let HSDP all-reduce over the replicas in the last backward of the step: set_requires_all_reduce(True) "
            "before it."
        )
    if lacking:
        return (
            "Reduce over all ranks that hold this parameter and evaluate other tokens: the group of this reduction "
            f"lacks an axis (data, context or expert-data parallel).{_too_few_divide(case)}"
        )
    if case.whole:
        return "Do to these parameters' gradients what your code does to the others: reduce them and scale them alike."
    if (early := _too_early(case)) is not None:
        at = early.site.short if early.site is not None else "this reduction"
        return f"Reduce once, after the last backward of the step: {at} runs before it."
    if beside and beside.site:
        as_others = f"Reduce these parameters' gradients too, as {beside.site.short} does with the others"
        all_hold = all(set(beside.group) <= ranks for ranks in holders if not ranks.isdisjoint(beside.group))
        if all_hold or all(len(ranks) == 1 for ranks in holders):  # those that one rank alone reads are its share
            return f"{as_others}."
        return f"{as_others}, but over the ranks that hold the same ones alone ({over})."
    wrong = {cell.key for _, cell in case.cells if not cell.right}
    if case.configured_at is not None and case.context.again and wrong <= case.context.again.keys():
        return (
            "Call backward() once behind each forward: a wrapper reduces in the first pass that goes backward from it, "
            "and this one differentiates its loss again."
        )
    sync = getattr(case.event, "sync", None)
    if sync and len(holders) > 1:  # experts, of which a wrapper over all ranks would make one
        return (
            f"Reduce these parameters' gradients by hand over the ranks that hold the same ones ({over}) after the "
            "last backward, and divide by as much as the wrapper divides the others by."
        )
    if sync and not case.idle and not all(weighs_nothing(cell.ratio, cell.margin) for _, cell in case.cells):
        return (
            "Make these parameters part of the wrapped module before it is wrapped, and list none as ignored: the "
            "wrapper reduces others in this pass. Or reduce them by hand (dist.all_reduce), by the same number."
        )
    if case.configured_at is None and sync is None and not unsynced(case.event):
        return (
            "Reduce the gradients over these ranks after the last backward (dist.all_reduce, and a division by their "
            "number where each rank's loss is a mean of its own), or train through DDP or FSDP."
        )
    if sync and not case.idle:
        return (
            "Let the last backward of the step reduce these parameters, too: a wrapper keeps their gradients aside "
            "(FSDP2: set_requires_gradient_sync(True) on every module that it was turned off for)."
        )
    return f"Let the last backward of the step reduce: {syncing(case.event)}."


def _too_few_divide(case: Case) -> str:
    """What a division behind a reduction over too few ranks still is, once it is over all of them."""
    event, factor = _last_reduction(case), case.pattern.factor
    if event is None or abs(nominal_factor(event) - 1) > 1e-6 or abs(factor - 1) <= max(1e-3, case.pattern.tolerance):
        return ""
    return (
        f" What arrives weighs x {factor:.6g} of what it should: what divides behind it has to count all of them, too."
    )


def _last_reduction(case: Case) -> Reduce | None:
    """The last reduction of these gradients on the rank that is told."""
    found = [event for held in case.held if held.rank == case.culprit.rank for event in _reductions(held)[-1:]]
    return max(found, key=lambda event: event.seq, default=None)


def _left_out(case: Case) -> Answer | None:
    """Gradients that a reduction which nobody recorded leaves as they were."""
    gone = [(held, cell) for held, cell in case.cells if abs(cell.ratio) <= max(1e-3, cell.margin)]
    only_others = bool(gone) and all(_is_foreign(case, held.rank, cell.key[0]) for held, cell in gone)
    if case.pattern.kind != "own-rank-only" and not (case.pattern.kind == "zeroed" and only_others):
        return None
    end = "the optimizer" if case.culprit.before is None else f"the {kind_of(case.culprit.before)} event"
    if case.culprit.elsewhere:
        return Answer(
            explanation=f"Other ranks' contributions never reach this gradient ({case.pattern.text}): between the "
            f"{case.culprit.kind} event and {end} other ranks' copies of it are given them, by a reduction that was "
            f"not recorded; what {numbered('rank', case.ranks)} {'reads' if len(case.ranks) == 1 else 'read'} is left "
            "as it was.",
            fix="Give every rank the result: broadcast what one rank has gathered, or reduce on all of them "
            "(dist.all_reduce).",
        )
    return Answer(
        explanation=f"Other ranks' contributions never reach this gradient ({case.pattern.text}): between the "
        f"{case.culprit.kind} event and {end} other gradients are given them, by a reduction that was not recorded; "
        "these are left as they were.",
        fix="Reduce these parameters' gradients too, as your code does with the others between these two lines.",
    )


def _returned_by(case: Case) -> str | None:
    """The communication hook that returned its own rank's gradient; None where none did."""
    event = case.reduce
    inside = case.culprit.unrecorded and isinstance(case.culprit.before, Reduce)
    return event.hook if event is not None and inside and case.pattern.kind == "own-rank-only" else None


def _did_nothing(case: Case) -> bool:
    """Whether a wrapper's reduction, which should have joined several ranks, was measured to leave each its own."""
    event, factor = case.reduce, case.culprit.factor
    if event is None or event.impl not in DATA_PARALLEL or len(event.group) < 2 or factor is None:
        return False
    if case.culprit.absent or case.culprit.unrecorded or case.pattern.kind != "own-rank-only":
        return False
    return abs(factor - 1) <= max(1e-3, 2 * case.pattern.tolerance)


def _idle_hook(case: Case) -> Reduce | None:
    """The communication hook in which no collective was seen, in the place of the wrapper's reduction of all of these;
    None where there is none."""
    found = [reductions[-1] for held in case.held if (reductions := _reductions(held))]
    idle = len(found) == len(case.held) and all(
        event.impl in DATA_PARALLEL and event.hook is not None and event.op == "unknown" for event in found
    )
    return min(found, key=lambda event: event.seq) if idle and case.pattern.kind == "own-rank-only" else None


def _left_aside(case: Case) -> Event | None:
    """The reduction whose result was not written back; None where there is none for some gradient."""
    found = [held.replay.unwritten.get(held.rank) for held in case.held]
    return next((event for event in found if event is not None), None) if all(found) else None


def _stepped_ahead(case: Case) -> OptimizerStep | None:
    """The optimizer's step that all of these gradients' wrapper reduces behind, in the same pass; None without one."""
    found: list[OptimizerStep] = []
    for held in case.held:
        read = next((entry.event for entry in held.replay.history(held.rank)[::-1] if entry.event is not None), None)
        behind = [entry.event for entry in held.replay.entries[held.rank] if isinstance(entry.event, Reduce)]
        late = [event for event in behind if read is not None and event.seq > read.seq and event.impl in DATA_PARALLEL]
        if not isinstance(read, OptimizerStep) or not late:
            return None
        found.append(read)
    return min(found, key=lambda event: event.seq, default=None)


def _reductions(held: Held) -> list[Reduce]:
    """What reduced a gradient on its rank, in order."""
    return [entry.event for entry in held.replay.history(held.rank) if isinstance(entry.event, Reduce)]


def _holders(case: Case) -> set[frozenset[int]]:
    """The ranks that hold each parameter."""
    found: dict[ParamKey, set[int]] = defaultdict(set)
    for held in case.held:
        found[held.param].update(held.ranks)
    return {frozenset(ranks) for ranks in found.values()}


def _too_early(case: Case) -> Reduce | None:
    """The program's own reduction of these gradients that the last pass follows; None where there is none."""
    reduced = _last_reduction(case)
    if reduced is None or reduced.impl in DATA_PARALLEL or not isinstance(case.event, Backward):
        return None
    return reduced if reduced.seq < case.event.seq else None


def _other_group(case: Case, missing: set[int]) -> str | None:
    """Over which ranks gradients were reduced instead, where each such reduction left out the missing ones."""
    place = case.context.contributions.coordinate
    reductions = [(held.rank, event) for held in case.held for event in _reductions(held)]
    shards: dict[int, set[int]] = defaultdict(set)
    for rank, event in reductions:
        shards[rank] |= set(event.group)
    groups: set[tuple[int, ...]] = set()
    for _, event in reductions:
        replicas = event.replicate_group if event.all_reduced else ()
        groups.add(tuple(sorted({*event.group, *(rank for one in replicas for rank in shards.get(one, {one}))})))
    shown = sorted(group for group in groups if len(group) > 1)
    if not shown or any(missing <= {place.get(rank, -1) for rank in group} for group in shown):
        return None
    words = " | ".join(",".join(map(str, group)) for group in shown[:MOST_GROUPS])
    more = f" and {len(shown) - MOST_GROUPS} more groups" if len(shown) > MOST_GROUPS else ""
    return f" These gradients are reduced over ranks {words}{more} only."


def _arrived_in_part(held: Held, missing: Cell) -> bool:
    """Whether another rank's summand of the same contribution did reach the gradient, or may have, being zero."""
    return held.has_zero_summand(missing.key) or any(
        cell.key == missing.key and abs(cell.ratio) > max(1e-3, cell.margin) for cell in held.cells
    )


def could_audit(facts: StepFacts) -> bool:
    return any(_rooted(event) for of_rank in facts.data.events.values() for event in of_rank)


def audit(facts: StepFacts) -> Iterator[Remark]:
    yield from _left_to_one(facts)
    yield from _uncounted(facts)


def _uncounted(facts: StepFacts) -> Iterator[Remark]:
    """Parameters whose losses count nothing have no expected weight, beside others that have one. That no other rank's
    gradient comes to a copy is seen all the same."""
    place = facts.contributions.coordinate
    missing: list[Held] = []
    may_tell = CODE not in facts.found and facts.data.complete and facts.contributions.by_key
    for held in facts.held if may_tell else ():
        keys = held.replay.basis.keys
        if (
            held.observed is None
            or held.stderr is None
            or held.cells
            or any(key in facts.contributions.by_key for key in keys)
        ):
            continue
        own = [abs(held.observed[c]) for c, key in enumerate(keys) if key[0] == place.get(held.rank)]
        sizes = np.abs(held.observed) + 6 * held.stderr
        others = [size for size, key in zip(sizes, keys, strict=True) if key[0] != place.get(held.rank)]
        if own and others and min(own) > 0 and max(others) <= 1e-3 * min(own):
            missing.append(held)
    together = {rank for held in missing for rank in held.ranks}
    if not missing or any(together <= set(one.ranks) for one in undoing_gathers(facts.data)):
        return  # parts of a head that were drawn from one seed have their whole gradient behind such a gather
    params = frozenset(held.param for held in missing)
    if moved_alike(facts.data, params):
        return  # by an optimizer that combines something else over ranks in its step
    rank = min(held.rank for held in missing)
    ranks = tuple(sorted({rank for held in missing for rank in held.ranks}))
    passes = [event for event in facts.data.events[rank] if isinstance(event, Backward)]
    mine = {facts.data.tracks[key][rank].param.id for key in params if rank in facts.data.tracks[key]}
    last = [event for event in passes if mine.intersection(facts.data.params_of(rank, event.params))]
    yield Remark(
        answer=Answer(
            explanation=f"Other ranks' contributions never reach the gradients of {plural(len(params), 'parameter')}, "
            "which began alike on these ranks as copies do: no reduction followed their last backward, as others "
            "had one.",
            fix="Reduce these gradients too, or, where they are of each rank's own (heads, experts), draw them from "
            "seeds of their own.",
        ),
        pattern="other ranks' contributions x 0",
        params=params,
        ranks=ranks,
        rank=rank,
        event=last[-1] if last else None,
        factor=Factor(observed=0.0),
    )


def _left_to_one(facts: StepFacts) -> Iterator[Remark]:
    """Gradients reduced to one rank, which others step with as well: they read what is left in their own buffers.

    On gloo that is the whole sum in some parts of a buffer, which reads like the result that was sent back. So someone
    has to read something else than the rank to which they were reduced.
    """
    found: dict[ParamKey, int] = {}
    culprits: list[tuple[int, Reduce]] = []
    unlike = False
    stepped = {(held.param, rank) for held in facts.held for rank in held.ranks}
    for key, of_rank in facts.data.tracks.items():
        for rank, track in of_rank.items():
            if (key, rank) not in stepped:
                continue
            events = [event for event in facts.data.events[rank] if isinstance(event, Reduce | OptimizerStep)]
            mine = [event for event in events if track.param.id in facts.data.params_of(rank, event.params)]
            if len(mine) < 2 or not isinstance(step := mine[-1], OptimizerStep):
                continue
            last = mine[-2]
            if not isinstance(last, Reduce) or last.root in (None, rank):
                continue
            if step.optimizer == OWN_OPTIMIZER and not facts.data.complete:
                continue  # whether the root was going to send the parameter is not known
            left, read = _values(track, last.seq, AFTER), _values(track, step.seq, BEFORE)
            if left is not None and read is not None and read.any() and np.array_equal(left, read):
                found[key] = rank
                culprits.append((rank, last))
                unlike |= not _is_what_root_read(facts, of_rank.get(last.root), read)
    if not unlike or CODE in facts.found:
        return
    rank, event = culprits[0]
    ranks = tuple(sorted({rank for rank, _ in culprits}))
    yield Remark(
        answer=Answer(
            explanation=f"Gradients are reduced to rank {event.root} only, and on {numbered('rank', ranks)} "
            "an optimizer steps with what this left in the buffers there, which nobody documents.",
            fix="Reduce to all ranks (dist.all_reduce), or broadcast the result, or step on that one rank only and "
            "broadcast its parameters.",
        ),
        pattern=f"no reduced gradient of {plural(len(found), 'parameter')} on {numbered('rank', ranks)}",
        params=frozenset(found),
        ranks=ranks,
        rank=rank,
        event=event,
    )


def _is_what_root_read(facts: StepFacts, track: Track | None, read: np.ndarray) -> bool:
    """Whether an optimizer of the rank to which gradients were reduced read these values, bit by bit."""
    if track is None:
        return False
    events = [event for event in facts.data.events[track.rank] if isinstance(event, OptimizerStep)]
    steps = [event.seq for event in events if track.param.id in facts.data.params_of(track.rank, event.params)]
    values = _values(track, steps[-1], BEFORE) if steps else None
    return values is not None and np.array_equal(values, read)


def _rooted(event: Event) -> bool:
    return isinstance(event, Reduce) and event.root is not None


def _values(track: Track, seq: int, role: int) -> np.ndarray | None:
    return next((point.values.data for point in track.points if (point.seq, point.role) == (seq, role)), None)


def _is_foreign(case: Case, holder: int, data_rank: int) -> bool:
    return case.context.contributions.coordinate.get(holder) != data_rank
