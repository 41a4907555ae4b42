"""Clips that act on gradients which are not complete yet."""

from __future__ import annotations

import numpy as np

from gradcheck_dist.diagnosis.audits.facts import StepFacts
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.written import scale_of
from gradcheck_dist.events import AmpUnscale, Backward, Event, OptimizerStep, Reduce, ZeroGrad
from gradcheck_dist.ledger.tracks import ParamKey

SAME = 1e-3
"""Relative; how near the numbers must be by which a line multiplies all of a clip's gradients."""
SURE = 1e-4
"""Relative standard error of the weights that are compared."""


def completed_by(facts: StepFacts, call: ClipCall) -> Event | None:
    """What still changed the clipped gradients before an optimizer read them or they were emptied."""
    clipped = set(facts.data.params_of(call.rank, call.event.params))
    for event in facts.data.events[call.rank]:
        if event.seq <= call.event.seq or not isinstance(event, Backward | Reduce | OptimizerStep | ZeroGrad):
            continue
        if event.params is None or not clipped & set(facts.data.params_of(call.rank, event.params)):
            continue
        if isinstance(event, Reduce) and (event.num_ranks == 1 or _was_complete(facts, call, event)):
            continue
        return event if isinstance(event, Backward | Reduce) else None
    return None


def _was_complete(facts: StepFacts, call: ClipCall, reduction: Reduce) -> bool:
    """Whether all ranks brought the same into a reduction of clipped gradients (averaged once more, to be sure)."""
    clipped = {part.key for part in call.parts}
    entries = [
        entry
        for held in facts.held
        if held.rank == call.rank and held.param in clipped
        for entry in held.replay.history(held.rank)
        if entry.event is reduction
    ]
    return bool(entries) and all(entry.clip != 1 for entry in entries)


def scaled_later(facts: StepFacts, call: ClipCall) -> float | None:
    """The one number by which lines of the trainer's own multiply all gradients of a clip behind it; None where they do
    not, or that is not known, or take out a loss scale."""
    factors = list(factors_behind(facts, call).values())
    middle = float(np.median(factors)) if factors else 1.0
    alike = all(abs(factor - middle) <= SAME * middle for factor in factors)
    return middle if alike and middle > 0 and abs(middle - 1) > SAME else None


def scaled_apart(facts: StepFacts, call: ClipCall) -> dict[ParamKey, float]:
    """By what each gradient of a clip is multiplied behind it, where that is another number for some than for others,
    and is known of all; else empty."""
    factors = factors_behind(facts, call)
    if not factors or len(factors) < len({part.key for part in call.parts}) or min(factors.values()) <= 0:
        return {}
    return factors if max(factors.values()) > (1 + SAME) * min(factors.values()) else {}


def factors_behind(facts: StepFacts, call: ClipCall) -> dict[ParamKey, float]:
    """By what lines of the trainer's own multiply each gradient of a clip behind it, as far as that is known, is one
    number and makes its weights right (a normalisation does not); empty where they take out a loss scale."""
    behind = [event for event in facts.data.events[call.rank] if event.seq >= call.event.seq]
    if any(isinstance(event, AmpUnscale) or scale_of(event) is not None for event in behind):
        return {}
    clipped = {part.key for part in call.parts}
    found: dict[ParamKey, float] = {}
    for held in facts.held:
        is_one = held.rank == call.rank and held.param in clipped and _is_right(held)
        factors = _factors_behind(held, call.event) if is_one else []
        middle = float(np.median(factors)) if factors else 0.0
        if factors and all(abs(factor - middle) <= SAME * abs(middle) for factor in factors):
            found[held.param] = middle
    return found


def _is_right(held: Held) -> bool:
    return bool(held.cells) and all(abs(cell.ratio - 1) <= max(SAME, cell.tolerance) for cell in held.cells)


def _factors_behind(held: Held, clip: Event) -> list[float]:
    """By what each well known weight of a parameter is multiplied behind a clip, beside the clips' coefficients."""
    measured = [entry for entry in held.replay.history(held.rank) if entry.observed is not None and entry.sampled]
    then = next((entry for entry in reversed(measured) if entry.seq == clip.seq and entry.event is None), None)
    last = held.replay.final(held.rank)
    if then is None or then.observed is None or then.stderr is None:
        return []
    if last is None or last.observed is None or last.stderr is None:
        return []
    then_free, last_free = then.observed / then.clip, last.observed / last.clip
    sure = (then.stderr / then.clip <= SURE * np.abs(then_free)) & (last.stderr / last.clip <= SURE * np.abs(last_free))
    kept = sure & (np.abs(then_free) > 0)
    return [float(one) for one in last_free[kept] / then_free[kept]]
