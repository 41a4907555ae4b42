"""A clip that scales nothing: no parameter was left, the optimizer came first, or there was no gradient yet.

## What it does
Finds clips by norm that should have scaled the gradients and did not reach them: the call got no parameter at all (a
generator that an optimizer or a norm had used up, or gradients in the place of parameters, whose `.grad` torch
scales), or came after the optimizer had read the gradients. Or it came before the first backward pass, when they were
empty.

## Why it matters
The gradients are right, so nothing looks wrong; the run simply is not clipped. The first spike then does what clipping
was there to prevent.

## Example
    params = (p for p in model.parameters() if p.requires_grad)
    norm = torch.nn.utils.get_total_norm([p.grad for p in params])     # uses the generator up
    torch.nn.utils.clip_grads_with_norm_(params, 1.0, norm)            # nothing left to clip

## Fix
    params = [p for p in model.parameters() if p.requires_grad]        # a list can be read twice
and clip between the last backward (or `scaler.unscale_`) and `optimizer.step()`. Lightning: `gradient_clip_val`;
accelerate: `accelerator.clip_grad_norm_` under `accelerator.sync_gradients`.

## References
- pytorch/torchtitan#1258; pytorch/pytorch#148259 (torch warns of an empty generator, and goes on);
  huggingface/transformers#46113 (gradients in the place of parameters).
- torch/nn/utils/clip_grad.py: clip_grads_with_norm_ reads its parameters once.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.norms.effect import effect_of_clip
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall
from gradcheck_dist.events import Backward, OptimizerStep
from gradcheck_dist.ledger.tracks import ParamKey

CODE = "GS603"
NAME = "clip-without-effect"
ACTS = 0.999
LIST = "Give it a list of parameters: it scales their .grad, and a generator can be used up."


def could_audit(facts: StepFacts) -> bool:
    return any(call.event.coefficient < ACTS or call.event.total_norm == 0 for call in facts.norms.clips)


def audit(facts: StepFacts) -> Iterator[Remark]:
    idle = [call for call in facts.norms.clips if call.event.coefficient < ACTS]
    empty = [call for call in idle if _reached_nothing(facts, call)]
    late = [call for call in idle if _came_late(facts, call)]
    if empty:
        yield _remark(facts, empty, "it was given no parameter that is left to scale", LIST)
    if late:
        yield _remark(facts, late, "the optimizer had read the gradients before it", "Clip before optimizer.step().")
    total = facts.norms.of_model() or 0.0
    used_up = [call for call in facts.norms.clips if _is_used_up(facts, call) and call.event.max_norm < ACTS * total]
    if used_up:
        yield _remark(facts, used_up, "what it was given had been read to its end before, so its own norm is 0", LIST)
    if early := [call for call in facts.norms.clips if _came_early(facts, call)]:
        yield _of_nothing(facts, early)


def _owned(facts: StepFacts, rank: int, event: OptimizerStep) -> set[int]:
    return set(facts.data.params_of(rank, event.params))


def _steps(facts: StepFacts, rank: int) -> list[OptimizerStep]:
    return [event for event in facts.data.events[rank] if isinstance(event, OptimizerStep)]


def _reached_nothing(facts: StepFacts, call: ClipCall) -> bool:
    """The call was given nothing, no other clip of the rank scales anything, and an optimizer did step."""
    of_rank = [one for one in facts.norms.clips if one.rank == call.rank]
    touched = any(facts.data.params_of(call.rank, one.event.params) for one in of_rank)
    held = {key for rank, key in facts.norms.parts if rank == call.rank}
    return not touched and bool(held) and bool(_steps(facts, call.rank))


def _is_used_up(facts: StepFacts, call: ClipCall) -> bool:
    return call.event.used_up and call.event.norm_type == 2 and _reached_nothing(facts, call)


def _came_late(facts: StepFacts, call: ClipCall) -> bool:
    """An optimizer that owns the clipped parameters stepped before, and none does afterwards."""
    given = set(facts.data.params_of(call.rank, call.event.params))
    owners = [event for event in _steps(facts, call.rank) if given & _owned(facts, call.rank, event)]
    return bool(owners) and all(event.seq < call.event.seq for event in owners)


def _came_early(facts: StepFacts, call: ClipCall) -> bool:
    """All that the rank's clips of these parameters were given was empty: its passes came behind them."""
    given = set(facts.data.params_of(call.rank, call.event.params))
    clips = (one.event for one in facts.norms.clips if one.rank == call.rank)
    others = (one for one in clips if not given.isdisjoint(facts.data.params_of(call.rank, one.params)))
    if any(one.total_norm != 0 for one in others):
        return False
    events = facts.data.events[call.rank]
    passes = [event.seq for event in events if isinstance(event, Backward)]
    stepped = [step.seq for step in _steps(facts, call.rank) if step.seq < call.event.seq]
    since = max(stepped, default=-1)
    read = any(given & _owned(facts, call.rank, step) for step in _steps(facts, call.rank))
    return bool(passes) and read and not any(since < seq < call.event.seq for seq in passes) and bool(_got(facts, call))


def _got(facts: StepFacts, call: ClipCall) -> set[ParamKey]:
    """The parameters that were given, and that had a gradient in this step."""
    given = set(facts.data.params_of(call.rank, call.event.params))
    tracks = {key: of_rank[call.rank] for key, of_rank in facts.data.tracks.items() if call.rank in of_rank}
    return {key for key, track in tracks.items() if track.leaves and track.param.id in given}


def _of_nothing(facts: StepFacts, calls: list[ClipCall]) -> Remark:
    first = min(calls, key=lambda call: (call.rank, call.event.seq))
    return Remark(
        answer=Answer(
            explanation="When the clip ran, its parameters had no gradient (total norm 0): the step's first backward "
            "pass came behind it, and the optimizer read what nobody had clipped.",
            fix="Clip between the step's last backward pass and optimizer.step().",
        ),
        pattern="the optimizer got unclipped gradients",
        params=frozenset(key for call in calls for key in _got(facts, call)),
        ranks=tuple(sorted({call.rank for call in calls})),
        rank=first.rank,
        event=first.event,
    )


def _remark(facts: StepFacts, calls: list[ClipCall], why: str, fix: str) -> Remark:
    first = min(calls, key=lambda call: (call.rank, call.event.seq))
    event = first.event
    total, coefficient = event.total_norm, event.coefficient
    if event.used_up:  # by the norm that it was to be given
        total = facts.norms.of_model() or 0.0
        coefficient = event.max_norm / total
    ranks = {call.rank for call in calls}
    return Remark(
        answer=Answer(
            explanation=f"The total norm {total:.6g} is above max_norm {event.max_norm:g}, so gradients "
            f"should have been multiplied by {coefficient:.6g}; the clip changed none: {why}.",
            fix=fix,
        ),
        pattern=f"the optimizer got x {1 / coefficient:.6g} of what the clip's coefficient asks for"
        if coefficient
        else "the optimizer got unclipped gradients",
        params=frozenset(key for rank, key in facts.norms.parts if rank in ranks),
        ranks=tuple(sorted(ranks)),
        rank=first.rank,
        event=event,
        factor=Factor(observed=1 / coefficient if coefficient else None),
        effect=effect_of_clip(facts.data, facts.norms, dict.fromkeys(ranks, 1.0), coefficient),
    )
