"""Each rank clips by the norm of what lies on it, not by the norm of the whole gradient.

## What it does
Compares the total norm that a clip used with the norm of the gradients that were there, over all ranks that train one
model: copies counted once, shards, tensor-parallel parts, experts and pipeline stages all added up. Finds clips whose
norm is that of the rank's own shards, of the parameters of its own pipeline stage, or combined along some axes only
(over the stages and not over the shards). What the user's own norm may be off by (its type, torch's summation on a
CPU) is allowed for.

## Why it matters
The gradients are right and every rank prints a norm that looks fine, but each part of the model is scaled by a
coefficient of its own: the direction of the update changes from step to step, and with the layout. Adam does not undo
it, for the coefficients change.

## Example
    norm = torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)     # with pp > 1: the norm of one stage

    grads = [p.grad.to_local() for p in model.parameters()]            # with FSDP2: the norm of one rank's shards
    norm = torch.nn.utils.get_total_norm(grads)

## Fix
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if isinstance(norm, DTensor):                                      # FSDP2, tensor parallel: over the shards
        norm = norm.full_tensor()
    if pp_group is not None:                                           # pipelines: over the stages
        norm = norm**2
        dist.all_reduce(norm, group=pp_group)
        norm = norm**0.5
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
FSDP1: `model.clip_grad_norm_(1.0)`, the wrapper's own method. torchtitan: `dist_utils.clip_grad_norm_` with `pp_mesh`.
DeepSpeed, Megatron: leave clipping to the engine (`gradient_clipping`, `--clip-grad`).

## References
- pytorch/torchtitan#596, #649, #766; inclusionAI/AReaL#312; pytorch/pytorch#88621; NVIDIA-NeMo/Automodel#3816.
- torch/nn/utils/clip_grad.py, get_total_norm and clip_grads_with_norm_.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.clip_words import effect, remark, remark_by_hand, severity_of
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.norms.clips import SHARDS, SOME, STAGE, JudgedClip, judge_clips
from gradcheck_dist.diagnosis.norms.hand_norms import HandNorm
from gradcheck_dist.diagnosis.norms.step_norms import local_norm, own_error
from gradcheck_dist.events import Clip, OptimizerStep
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import numbered

CODE = "GS601"
NAME = "local-clip-norm"
MOST = 0.5
"""Share of the norm on a rank that what was scaled there has at least."""
FIX = (
    "Combine the norm over all ranks that hold parts of the model before clipping: full_tensor() of a DTensor norm, "
    "and an all-reduce of its square over tensor-parallel ranks (what all of them hold counted once) and the pipeline."
)


def judge(case: Case) -> Answer | None:
    """A clip that nothing recorded: each rank's part was scaled by a factor of its own, to one and the same norm."""
    culprit, norms = case.culprit, case.norms
    if norms is None or not culprit.unrecorded or not isinstance(culprit.before, OptimizerStep | Clip):
        return None
    factors: dict[int, list[float]] = defaultdict(list)
    scales: dict[int, set[ParamKey]] = defaultdict(set)
    for held, cell in case.cells:
        for rank in held.ranks:
            factors[rank].append(cell.ratio)
            scales[rank].add(held.param)
    parts = {rank: [part for (owner, _), part in norms.parts.items() if owner == rank] for rank in factors}
    tolerance = max((own_error(of_rank) for of_rank in parts.values() if of_rank), default=1.0)
    scaled = {rank: ratios for rank, ratios in factors.items() if abs(ratios[0] - 1) > 2 * tolerance}
    if any(abs(ratio / ratios[0] - 1) > 2 * tolerance for ratios in factors.values() for ratio in ratios if ratios[0]):
        return None
    first = {rank: ratios[0] for rank, ratios in scaled.items()}
    norm = {rank: local_norm(parts[rank]) for rank in scaled}
    if any(local_norm(part for part in parts[rank] if part.key in scales[rank]) < MOST * norm[rank] for rank in scaled):
        return None  # some parameters alone were scaled
    left = sorted(norm.values())
    if (
        len(first) < 2
        or not 0 < min(first.values()) < max(first.values()) * (1 - 2 * tolerance)
        or max(first.values()) > 1
    ):
        return None
    if not left[0] or left[-1] > left[0] * (1 + 2 * tolerance):
        return None
    shown = ", ".join(f"x {factor:.4g} on rank {rank}" for rank, factor in sorted(first.items())[:4])
    return Answer(
        explanation=f"Every rank's gradients were scaled to norm {left[0]:.6g} of what lies on it ({shown}), by "
        "nothing recorded: a hand-written clip by a norm that was not combined over the ranks that train one model.",
        fix=FIX,
    )


def could_audit(facts: StepFacts) -> bool:
    """Whether several ranks clip one model, and the norm of it is known."""
    return any(len(facts.norms.together(one.call.rank)) > 1 for one in judge_clips(facts.norms))


def audit(facts: StepFacts) -> Iterator[Remark]:
    lines: dict[tuple[object, ...], list[JudgedClip]] = defaultdict(list)
    for one in judge_clips(facts.norms):
        if one.meaning in (SHARDS, STAGE, SOME):
            lines[(*one.call.place[:-1], one.meaning)].append(one)
    for clips in lines.values():
        yield remark(facts, clips, _answer(clips))
    if facts.by_norm is not None and facts.by_norm.meaning in (SHARDS, SOME):
        yield remark_by_hand(facts, facts.by_norm, _by_hand(facts.by_norm))


def _by_hand(clip: HandNorm) -> Answer:
    if clip.meaning == SOME:
        return Answer(
            explanation=f"A hand-written clip leaves norm {clip.norm:.4g} of what lies on "
            f"{numbered('rank', clip.over)}, where all gradients have norm {clip.truth:.6g}: every rank clips by "
            "the norm of these ranks' parameters, and what the other stages hold adds nothing to it.",
            fix=FIX,
        )
    shown = ", ".join(f"x {factor:.4g} on rank {rank}" for rank, factor in sorted(clip.factors.items())[:4])
    where = f"it and its group (of rank {min(clip.over)}: {numbered('rank', clip.over)})" if clip.over else "it"
    return Answer(
        explanation=f"Every rank's gradients were scaled to norm {clip.norm:.4g} of what lies on {where} ({shown}), by "
        f"a hand-written clip whose norm was not combined over the ranks that train one model. All gradients have norm "
        f"{clip.truth:.6g} after it. Where coefficients differ, copies that ranks hold drift apart.",
        fix=FIX,
    )


def _answer(clips: list[JudgedClip]) -> Answer:
    worst = max(clips, key=lambda one: abs(one.ratio - 1))
    event = worst.call.event
    what = {
        SHARDS: "its own shards",
        STAGE: "the parameters that lie on it (its pipeline stage, or its tensor-parallel shards)",
        SOME: f"what lies on some of the ranks (of rank {worst.call.rank}: {numbered('rank', worst.ranks)})",
    }[worst.meaning]
    return Answer(
        severity=severity_of(clips),
        explanation=f"Each rank clips by the norm of {what}: rank {worst.call.rank} used {event.total_norm:.6g}, where "
        f"those of the whole model have {worst.truth.middle:.6g} (max_norm {event.max_norm:g}). {effect(clips)}",
        fix=FIX,
    )
