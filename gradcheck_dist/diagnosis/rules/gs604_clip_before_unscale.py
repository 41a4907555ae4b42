"""Gradients are clipped while they carry a loss scale, and unscaled afterwards.

## What it does
Finds clips that come before the GradScaler's unscaling of the same parameters and act: they scale gradients that are S
times too large down to max_norm, and unscaling leaves max_norm / S for the optimizer. So do those of several
optimizers' gradients of which only some are unscaled. A line of the trainer's own that divides by a power of two from
32 on behind the clip, and whose division makes the weights right, unscales as well. A max_norm that is a written number
times S is taken to be meant. A clip by lines of the trainer's own is known by the norm that it left: times S it is a
written number, and as it is none. A clip by value (`clip_grad_value_`) is told by the sampled elements that it clamps
for their scale alone.

## Why it matters
Nearly every step is clipped, to a norm S times below the one that was asked for: the update depends on max_norm and S
instead of the gradient. With Adam, epsilon begins to dominate; without, training stands still.

## Example
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)                    # unscales here, after the clip

## Fix
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
accelerate: `accelerator.clip_grad_norm_` unscales by itself. FSDP: `ShardedGradScaler`, the same order.

## References
- pytorch/examples#1196; torch.amp examples, "Gradient clipping".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Candidate, Factor
from gradcheck_dist.diagnosis.norms.clips import ACTS, is_round
from gradcheck_dist.diagnosis.norms.effect import effect_of_clip
from gradcheck_dist.diagnosis.norms.scaled_clips import ScaledClip
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall
from gradcheck_dist.diagnosis.weights.written import scale_of
from gradcheck_dist.events import BEFORE, AmpUnscale, Clip, ClipValue, GradWrite
from gradcheck_dist.ledger.tracks import ParamKey, Track

CODE = "GS604"
NAME = "clip-before-unscale"
PATTERN = "clipped by the norm of scaled gradients"
SAME = 1e-3
"""Relative: a clip that is nearer than this to what it should be is right."""


def could_audit(facts: StepFacts) -> bool:
    return facts.scaled is not None or (
        (bool(facts.norms.clips) or any(True for _ in facts.events_of(ClipValue)))
        and any(
            isinstance(event, AmpUnscale) or scale_of(event) is not None
            for events in facts.data.events.values()
            for event in events
        )
    )


def audit(facts: StepFacts) -> Iterator[Remark]:
    if facts.scaled is not None:
        yield _of_hand(facts, facts.scaled)
    yield from _of_values(facts)
    wrong = [found for call in facts.norms.clips if (found := _scaled(facts, call)) is not None]
    if not wrong:
        return
    first = min(wrong, key=lambda one: (one.call.rank, one.call.event.seq))
    by_hand = not any(isinstance(event, AmpUnscale) for event in facts.data.events[first.call.rank])
    event = first.call.event
    yield Remark(
        answer=_answer(event.max_norm, event.total_norm, first.scale, by_hand)
        if first.norm is None
        else _answer_of_some(event.max_norm, event.total_norm, first.scale, first.norm),
        pattern=f"all gradients x {event.coefficient / first.right:.4g}: {PATTERN}",
        params=frozenset(part.key for one in wrong for part in one.call.parts),
        ranks=tuple(sorted({one.call.rank for one in wrong})),
        rank=first.call.rank,
        event=event,
        factor=_factor(event.coefficient / first.right, first.right, first.scale)
        if first.norm is None
        else Factor(observed=event.coefficient / first.right),
        effect=effect_of_clip(
            facts.data,
            facts.norms,
            {one.call.rank: one.call.event.coefficient for one in wrong},
            first.right,
            first.scale if first.norm is None else event.total_norm / first.norm,
        ),
    )


@dataclass(frozen=True)
class _Scaled:
    """A clip that acts on gradients of which all, or some, carry a loss scale. `norm`: that of all without it, where
    some had none; None where all carry it. `right`: what the clip should have multiplied by."""

    call: ClipCall
    scale: float
    norm: float | None
    right: float


def _scaled(facts: StepFacts, call: ClipCall) -> _Scaled | None:
    """None where nothing is wrong with the scale of what is clipped."""
    event, found = call.event, _unscaled_later(facts, call.rank, call.event)
    if found is None or event.coefficient >= 1 - ACTS:
        return None
    scale, later = found
    squares = [(part.square, part.key in later) for part in call.parts if isfinite(part.norm)]
    carry, free = (sum(square for square, carries in squares if carries is which) for which in (True, False))
    if not free:
        right = min(1.0, event.max_norm * scale / event.total_norm)
        return None if is_round(event.max_norm / scale) else _Scaled(call, scale, None, right)
    norm = event.total_norm * sqrt((free + carry / scale**2) / (free + carry))
    right = min(1.0, event.max_norm / norm)
    return _Scaled(call, scale, norm, right) if event.coefficient < right * (1 - SAME) else None


def _of_hand(facts: StepFacts, clip: ScaledClip) -> Remark:
    right = min(1.0, clip.max_norm * clip.scale / clip.total_norm)
    used = dict.fromkeys(clip.ranks, clip.factor)
    return Remark(
        answer=_answer(clip.max_norm, clip.total_norm, clip.scale, clip.by_hand),
        pattern=f"all gradients x {clip.factor / right:.4g}: {PATTERN}",
        params=frozenset(held.param for held in facts.held if held.cells),
        ranks=clip.ranks,
        rank=clip.rank,
        event=clip.event,
        factor=_factor(clip.factor / right, right, clip.scale),
        effect=effect_of_clip(facts.data, facts.norms, used, right, clip.factor),  # norms behind it were recorded
    )


def _answer(max_norm: float, total_norm: float, scale: float, by_hand: bool) -> Answer:
    norm = total_norm / scale
    return Answer(
        explanation=f"Gradients were clipped to norm {max_norm:g} while they carried loss scale {scale:g} (norm "
        f"{total_norm:.6g}), and unscaled afterwards: the optimizer gets the norm {max_norm / scale:.6g}. Unscaled "
        f"their norm is {norm:.6g}, "
        + (f"to be clipped to {max_norm:g}." if norm > max_norm else "and nothing was to be clipped."),
        fix="Call scaler.unscale_(optimizer) before clipping."
        if not by_hand
        else "Divide the gradients by the loss scale before clipping.",
    )


def _answer_of_some(max_norm: float, total_norm: float, scale: float, norm: float) -> Answer:
    return Answer(
        explanation=f"Gradients were clipped to norm {max_norm:g} while some of them carried loss scale "
        f"{scale:g} and the others did not (norm {total_norm:.6g} of both). Unscaled their norm is {norm:.6g}, "
        + (f"to be clipped to {max_norm:g}." if norm > max_norm else "and nothing was to be clipped."),
        fix="Call scaler.unscale_ for every optimizer whose gradients are clipped, before clipping.",
    )


def _factor(observed: float, right: float, scale: float) -> Factor:
    expression = "1/loss_scale" if right < 1 else None
    return Factor(
        observed=observed,
        expression=expression,
        candidates=[Candidate(expression=expression, value=1 / scale)] if expression else [],
    )


def _of_values(facts: StepFacts) -> Iterator[Remark]:
    """Elements that were clamped for their loss scale alone. A threshold that is a written number times the scale is
    meant, as for norms."""
    wrong: list[tuple[int, ClipValue, float, dict[ParamKey, np.ndarray]]] = []
    for rank, event in facts.events_of(ClipValue):
        found = _unscaled_later(facts, rank, event)
        if found is None or is_round(event.clip_value / found[0]):
            continue
        sizes = dict(_sizes(facts, rank, event, found[1]))
        if any(_smaller(one, event, found[0]).any() for one in sizes.values()):
            wrong.append((rank, event, found[0], sizes))
    if not wrong:
        return
    rank, event, scale, _ = min(wrong, key=lambda one: (one[0], one[1].seq))
    smaller = [_smaller(one, event, scale) for _, event, scale, sizes in wrong for one in sizes.values()]
    by_hand = not any(isinstance(other, AmpUnscale) for other in facts.data.events[rank])
    yield Remark(
        answer=_answer_of_values(event.clip_value, scale, float(np.concatenate(smaller).mean()), by_hand),
        pattern="elements clamped while they were scaled",
        params=frozenset(key for *_, sizes in wrong for key in sizes),
        ranks=tuple(sorted({one for one, *_ in wrong})),
        rank=rank,
        event=event,
    )


def _sizes(
    facts: StepFacts, rank: int, event: ClipValue, keys: frozenset[ParamKey]
) -> Iterator[tuple[ParamKey, np.ndarray]]:
    """The sizes of the sampled elements of each gradient in front of the clip."""
    for key in keys:
        track: Track | None = facts.data.tracks[key].get(rank)
        point = (
            next((one for one in track.points if (one.seq, one.role) == (event.seq, BEFORE)), None) if track else None
        )
        if point is not None:
            sizes = np.abs(point.values.data)
            yield key, sizes[np.isfinite(sizes)]


def _smaller(sizes: np.ndarray, event: ClipValue, scale: float) -> np.ndarray:
    """Which elements the optimizer reads otherwise than if they had been unscaled first."""
    right = np.minimum(sizes, event.clip_value * scale)
    return np.asarray(np.minimum(sizes, event.clip_value) < right * (1 - SAME))


def _answer_of_values(most: float, scale: float, part: float, by_hand: bool) -> Answer:
    return Answer(
        explanation=f"Elements were clamped to +-{most:g} while gradients carried loss scale {scale:g}, and unscaled "
        f"afterwards: the optimizer gets +-{most / scale:.6g} at most. Of the sampled elements {100 * part:.3g} % are "
        "smaller for it than they should be.",
        fix="Call scaler.unscale_(optimizer) before clipping."
        if not by_hand
        else "Divide the gradients by the loss scale before clipping.",
    )


def _unscaled_later(facts: StepFacts, rank: int, clip: Clip | ClipValue) -> tuple[float, frozenset[ParamKey]] | None:
    """The scale that is taken out of clipped gradients after the clip, and of which; None where there is none, or where
    it had been taken out before."""
    keys = {track[rank].param.id: key for key, track in facts.data.tracks.items() if rank in track}
    clipped = set(facts.data.params_of(rank, clip.params))
    carrying, seen, scales = set(clipped), set[int](), set[float]()
    for event in facts.data.events[rank]:
        if not isinstance(event, AmpUnscale) or event.scale in (0.0, 1.0):
            continue
        first = (clipped & set(facts.data.params_of(rank, event.params))) - seen
        seen |= first
        if first and event.seq > clip.seq:
            scales.add(event.scale)
        else:
            carrying -= first
    if seen:
        return (scales.pop(), frozenset(keys[one] for one in carrying if one in keys)) if len(scales) == 1 else None
    if not facts.weights_right:
        return None  # what the loss never carried is no scale
    for event in facts.data.events[rank]:
        scale = scale_of(event)
        if scale is None or event.seq < clip.seq:
            continue
        if isinstance(event, GradWrite) and clipped & set(facts.data.params_of(rank, event.params)):
            return scale, frozenset(keys.values())
    return None
