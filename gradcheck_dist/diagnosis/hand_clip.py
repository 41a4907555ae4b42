"""Clips that people write themselves, told from forgotten constants by the norm that they leave behind.

A clip by norm leaves the whole gradient with exactly max_norm, a number that somebody wrote; a constant leaves
whatever comes out. One step is enough for this, where the norm is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradcheck_dist.diagnosis.case import Case
from gradcheck_dist.diagnosis.cells import Held
from gradcheck_dist.diagnosis.clips import is_round
from gradcheck_dist.diagnosis.norms import Part, StepNorms, norm_of, own_error
from gradcheck_dist.events import Clip, OptimizerStep
from gradcheck_dist.ledger.tracks import StepData

TOO_VAGUE = 0.02
"""With a tolerance above this, every number is near to one that people write."""


@dataclass(frozen=True)
class HandClip:
    """All gradients were multiplied by `factor`, after which their norm was `norm`."""

    factor: float
    norm: float
    text: str


def could_be_clip(case: Case) -> bool:
    """Whether everything was made smaller alike, by nothing recorded, just before the clip or the optimizer."""
    culprit, pattern = case.culprit, case.pattern
    ends = isinstance(culprit.before, OptimizerStep | Clip)
    return culprit.unrecorded and ends and pattern.kind == "uniform" and 0 < pattern.factor < 1 and case.everywhere


def norm_afterwards(case: Case, data: StepData, norms: StepNorms) -> float | None:
    """The norm of all gradients where the culprit's bracket ends; None where it is not known as one number."""
    before = case.culprit.before
    if before is None:
        return None
    found = []
    for group in {norms.together(held.rank) for held in case.held}:
        parts = [part for (rank, _), part in norms.parts.items() if rank in group]
        if any(_first_clip(data, rank, type(before)) is None for rank in group):
            return None
        norm = norm_of(parts)
        if not parts or not norm.known or not norm.exact:
            return None
        found.append(norm.middle)
    return found[0] if found and max(found) <= min(found) * (1 + 1e-3) else None


def _first_clip(data: StepData, rank: int, kind: type) -> object | None:
    """The event at which a rank's norms were taken, when it is of this kind."""
    ends = [event for event in data.events[rank] if isinstance(event, Clip | OptimizerStep)]
    return ends[0] if ends and isinstance(ends[0], kind) else None


def clip_by_hand(cases: list[Case], data: StepData, norms: StepNorms) -> HandClip | None:
    """The clip among the cases of a step, when one surely is."""
    for case in cases:
        if not could_be_clip(case):
            continue
        norm = norm_afterwards(case, data, norms)
        tolerance = own_error(_parts(case, norms))
        if norm is None or tolerance > TOO_VAGUE or not is_round(norm, tolerance):
            continue
        place = case.culprit.event.site if case.culprit.event is not None else None
        line = f" after {place.file.rpartition('/')[2]}:{place.line}" if place else ""
        text = (
            f"step {data.step}: gradients were clipped by hand to norm {float(f'{norm:.2g}'):g} (x "
            f"{case.pattern.factor:.4g}){line}; weights are freed of it"
        )
        return HandClip(case.pattern.factor, norm, text)
    return None


def _parts(case: Case, norms: StepNorms) -> list[Part]:
    ranks = {held.rank for held in case.held}
    return [part for (rank, _), part in norms.parts.items() if rank in ranks]


def freed(measured: list[Held], clip: HandClip) -> list[Held]:
    """What was measured, freed of the clip."""
    return [
        replace(held, observed=held.observed / clip.factor, stderr=held.stderr / clip.factor)
        if held.observed is not None and held.stderr is not None
        else held
        for held in measured
    ]
