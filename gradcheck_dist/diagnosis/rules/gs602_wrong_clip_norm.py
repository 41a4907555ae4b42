"""The norm that a clip used is not the norm of the gradients, or differs between ranks that should share it.

## What it does
Finds clips whose total norm is neither the norm of what was clipped nor of the whole gradient, by whatever mechanism:
copies counted once a rank (x sqrt(tp), x sqrt(dp)), experts that every rank adds up again, norms of parts that are
averaged over ranks, a norm taken before a reduction or an unscaling, a part left out, a gradient that is given twice,
which is scaled twice, too. A norm of nothing that can be
named, the same on all ranks, is a warning: leaving parameters out of it may be meant.
Where the trace cannot tell what the norm should be, it still finds ranks of one model that clip by different norms.

## Why it matters
Clipping begins at another norm than the configuration says, and the threshold moves when degrees change. With
different coefficients on ranks that hold copies, the copies drift apart.

## Example
    norm_squared = sum(p.grad.norm() ** 2 for p in model.parameters())
    dist.all_reduce(norm_squared, group=tp_group)     # replicated parameters are counted tp times

## Fix
Count every element once. With DTensors torch does: `get_total_norm(grads).full_tensor()`. By hand, add replicated
parameters on one rank of the group only:

    local = sum(p.grad.norm() ** 2 for p in model.parameters() if is_sharded(p) or tp_rank == 0)
    dist.all_reduce(local, group=tp_group)

Megatron-LM: mark them (`param_is_not_tensor_parallel_duplicate`), it leaves out what is not the first copy.

## References
- NVIDIA-NeMo/RL#3788; NVIDIA-NeMo/Automodel#3816; hpcaitech/ColossalAI#2192; deepspeedai/DeepSpeed#8475 (mean).
- Megatron-LM megatron/core/optimizer/clip_grads.py; torch/nn/utils/clip_grad.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.clip_words import effect, remark, remark_by_hand, severity_of
from gradcheck_dist.diagnosis.audits.early_clips import completed_by
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor, Severity
from gradcheck_dist.diagnosis.norms.clips import ACTS, COMBINED, COPIES, UNNAMED, JudgedClip, judge_clips
from gradcheck_dist.diagnosis.norms.hand_norms import HandNorm
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import numbered, plural

CODE = "GS602"
NAME = "wrong-clip-norm"
SQUARES = (
    "Add up the squares of the parts' norms over the ranks that hold them (ReduceOp.SUM), what several ranks hold "
    "counted once, and take the root of that sum."
)
COMPLETE = (
    "Take the norm of the gradients that are clipped, each element counted once, when they are complete: after the "
    "last reduction and after unscaling."
)
ORDER: list[Severity] = ["info", "warning", "error"]


def could_audit(facts: StepFacts) -> bool:
    return bool(judge_clips(facts.norms))


def audit(facts: StepFacts) -> Iterator[Remark]:
    judged = judge_clips(facts.norms)
    lines: dict[tuple[object, ...], list[JudgedClip]] = defaultdict(list)
    for one in judged:
        if one.meaning in (COPIES, UNNAMED, *COMBINED):
            lines[(*one.call.place[:-1], one.meaning)].append(one)
    for clips in lines.values():
        yield remark(facts, clips, _answer(clips))
    yield from _given_again(facts)
    if facts.by_norm is not None and facts.by_norm.meaning in (COPIES, *COMBINED):
        yield remark_by_hand(facts, facts.by_norm, _by_hand(facts.by_norm))
    if facts.weights_right and all(one.right for one in judged):
        yield from _unequal(facts)


def _by_hand(clip: HandNorm) -> Answer:
    if clip.meaning in COMBINED:
        return Answer(
            explanation=f"A hand-written clip leaves gradients of norm {clip.truth:.6g}, where {clip.norm:.4g} is "
            f"{clip.meaning} ({numbered('rank', clip.over)}): it used x {clip.ratio:.6g} of the norm, and cuts "
            f"{'too much' if clip.ratio > 1 else 'too little'}.",
            fix=SQUARES,
        )
    return Answer(
        explanation=f"A hand-written clip leaves gradients of norm {clip.truth:.6g}, where {clip.norm:.4g} is the norm "
        f"over {numbered('rank', clip.over)} with what each of them holds counted again: it used x "
        f"{clip.ratio:.6g} of the norm, and cuts too much.",
        fix="Count what several ranks hold once, on one of them, before the squares are summed over ranks.",
    )


def _answer(clips: list[JudgedClip]) -> Answer:
    worst = max(clips, key=lambda one: abs(one.ratio - 1))
    meaning = ": that is the norm over all ranks, with copies counted once a rank" if worst.meaning == COPIES else ""
    if worst.meaning in COMBINED:
        meaning = f": that is {worst.meaning} ({numbered('rank', (one.call.rank for one in clips))})"
    used = [one.call.event.total_norm for one in clips]
    alike = max(used) <= min(used) * (1 + 2 * worst.call.tolerance)
    meaning = meaning or ("" if alike else f"; it runs from {min(used):.6g} to {max(used):.6g} between ranks")
    severity = severity_of(clips)
    return Answer(
        severity=min(severity, "warning", key=ORDER.index) if alike and not worst.meaning else severity,
        explanation=f"The clip on rank {worst.call.rank} used norm {worst.call.event.total_norm:.6g}, the gradients "
        f"have {worst.truth.middle:.6g}, x {worst.ratio:.6g}{meaning}. {effect(clips)}",
        fix=SQUARES if worst.meaning in COMBINED else COMPLETE,
    )


def _given_again(facts: StepFacts) -> Iterator[Remark]:
    """Clips that are given some gradients more than once."""
    lines: dict[object, list[ClipCall]] = defaultdict(list)
    for call in facts.norms.clips:
        if call.event.repeated:
            lines[call.place[:-1]].append(call)
    for calls in lines.values():
        found = {(call.rank, key) for call in calls for key in _repeated(facts, call)}
        worst = min(calls, key=lambda call: call.event.coefficient)
        acts = worst.event.coefficient < 1 - ACTS
        each = f"x {worst.event.coefficient:.4g}"
        scaled = f"is multiplied as often by {each}, where others are once" if acts else "cuts nothing in this step"
        norm = f"total norm {worst.event.total_norm:.6g}, max_norm {worst.event.max_norm:g}"
        yield Remark(
            answer=Answer(
                severity="error" if acts else "warning",
                explanation=f"The clip is given the gradient of {in_short(sorted({key[1] for _, key in found}))} more "
                f"than once ({1 + max(Counter(worst.event.repeated).values())} times at most): it counts as often in "
                f"the norm ({norm}), and {scaled}.",
                fix="Give each gradient once: the model's parameters() alone, or list(dict.fromkeys(parameters)).",
            ),
            pattern=f"{plural(len({key for _, key in found}), 'gradient')} given more than once",
            params=frozenset(key for _, key in found),
            ranks=tuple(sorted({call.rank for call in calls})),
            rank=worst.rank,
            event=worst.event,
            factor=Factor(observed=worst.event.coefficient if acts else None),
        )


def _repeated(facts: StepFacts, call: ClipCall) -> Iterator[ParamKey]:
    for key, of_rank in facts.data.tracks.items():
        if call.rank in of_rank and of_rank[call.rank].param.id in call.event.repeated:
            yield key


def _unequal(facts: StepFacts) -> Iterator[Remark]:
    """Ranks of one model whose coefficients differ at one and the same call. What has not been reduced yet differs
    anyway: clipping that is told by GS605."""
    places: dict[tuple[object, ...], list[ClipCall]] = defaultdict(list)
    for call in facts.norms.clips:
        if completed_by(facts, call) is not None:
            continue
        places[(min(facts.norms.together(call.rank)), *call.place)].append(call)
    for calls in places.values():
        used = [call.event.coefficient for call in calls]
        tolerance = 2 * max(call.tolerance for call in calls)
        if len(calls) < 2 or not min(used) > 0 or max(used) <= min(used) * (1 + tolerance):
            continue
        least, most = (pick(calls, key=lambda call: call.event.coefficient) for pick in (min, max))
        yield Remark(
            answer=Answer(
                explanation=f"One clip of one model multiplies by {most.event.coefficient:.6g} on rank {most.rank} and "
                f"by {least.event.coefficient:.6g} on rank {least.rank} (total norms {most.event.total_norm:.6g} and "
                f"{least.event.total_norm:.6g}, max_norm {most.event.max_norm:g} and {least.event.max_norm:g}).",
                fix="Give every rank the same norm: combine it over all ranks that train the model, before clipping.",
            ),
            pattern=f"clip coefficients from {min(used):.4g} to {max(used):.4g} between ranks",
            params=frozenset(part.key for call in calls for part in call.parts),
            ranks=tuple(sorted(call.rank for call in calls)),
            rank=least.rank,
            event=least.event,
            factor=Factor(observed=min(used) / max(used), tolerance=tolerance),
        )
