"""What is said of clips whose norm is wrong."""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor, Severity
from gradcheck_dist.diagnosis.norms.clips import JudgedClip
from gradcheck_dist.diagnosis.norms.effect import effect_of_clip
from gradcheck_dist.diagnosis.norms.hand_norms import HandNorm
from gradcheck_dist.diagnosis.words import BY_HAND


def remark(facts: StepFacts, clips: list[JudgedClip], answer: Answer) -> Remark:
    """One finding for all clips of one line; the factor is that of the rank on which it is furthest off."""
    first = min(clips, key=lambda one: (one.call.event.step, one.call.rank, one.call.event.seq))
    worst = max(clips, key=lambda one: abs(one.ratio - 1))
    used = {one.call.rank: one.call.event.coefficient for one in clips}
    return Remark(
        answer=answer,
        pattern=f"total norm / norm of the gradients: {numbers(clips, 'ratio')}",
        params=frozenset(part.key for one in clips for part in one.call.parts),
        ranks=tuple(sorted({one.call.rank for one in clips})),
        rank=first.call.rank,
        event=first.call.event,
        factor=Factor(observed=worst.ratio, tolerance=worst.call.tolerance),
        effect=effect_of_clip(facts.data, facts.norms, used, first.right_coefficient),
    )


def remark_by_hand(facts: StepFacts, clip: HandNorm, answer: Answer) -> Remark:
    """A finding for a clip that nobody recorded, at the last event before it."""
    return Remark(
        answer=answer,
        pattern=f"{BY_HAND}: {clip.ratio:.4g}",
        params=frozenset(held.param for held in facts.held if held.cells),
        ranks=tuple(sorted(clip.factors)),
        rank=clip.rank,
        event=clip.event,
        factor=Factor(observed=clip.ratio),
    )


def numbers(clips: list[JudgedClip], name: str) -> str:
    """A number of each rank in words, at most four of them."""
    of_rank = {one.call.rank: getattr(one, name) for one in sorted(clips, key=lambda one: -one.call.rank)}
    shown = [f"{value:.4g} on rank {rank}" for rank, value in sorted(of_rank.items())[:4]]
    more = f" and others on {len(of_rank) - 4} more ranks" if len(of_rank) > 4 else ""
    return ", ".join(shown) + more


def severity_of(clips: list[JudgedClip]) -> Severity:
    """An error where gradients were scaled wrongly; a remark where clipping is off and a number alone is wrong."""
    if any(one.matters for one in clips):
        return "error"
    return "info" if all(one.call.event.max_norm == float("inf") for one in clips) else "warning"


def effect(clips: list[JudgedClip]) -> str:
    """What the wrong norm did to the gradients of this step."""
    if not any(one.matters for one in clips):
        return "In this step it changed no gradient: no rank was, or should have been, clipped."
    used = {one.call.rank: one.call.event.coefficient for one in clips}
    shown = ", ".join(f"{value:.4g} on rank {rank}" for rank, value in sorted(used.items())[:4])
    return f"Gradients were multiplied by {shown}, where all should have been by {clips[0].right_coefficient:.4g}."
