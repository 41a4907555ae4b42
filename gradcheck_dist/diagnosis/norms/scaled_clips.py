"""Clips that people write themselves in front of the line that takes the loss scale out of the gradients.

Such a clip leaves its max_norm, and the optimizer reads that over the scale: no number that people write, while the
product with the scale is one. Where the max_norm was multiplied by the scale on purpose, it is the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.own_lines import between, params_on, rank_of
from gradcheck_dist.diagnosis.norms.clips import is_round
from gradcheck_dist.diagnosis.norms.left_norms import error_of, norm_afterwards
from gradcheck_dist.diagnosis.norms.step_norms import StepNorms
from gradcheck_dist.diagnosis.weights.written import scale_of
from gradcheck_dist.events import SCALED, AmpUnscale, Event, GradWrite
from gradcheck_dist.ledger.tracks import StepData

DIGITS = 3
"""What has as many digits may be the norm that is meant."""


@dataclass(frozen=True)
class ScaledClip:
    """A clip by hand of gradients that carried a loss scale. They had `total_norm`, and were multiplied by `factor` to
    `max_norm`; `by_hand`: a line of the trainer's own takes out the scale. `event` is the line that clips, or the last
    event before it, on `rank`."""

    max_norm: float
    factor: float
    scale: float
    by_hand: bool
    event: Event | None
    rank: int
    ranks: tuple[int, ...]

    @property
    def total_norm(self) -> float:
        return self.max_norm / self.factor

    @property
    def text(self) -> str:
        return (
            f"gradients were clipped by hand to norm {self.max_norm:.4g} (x {self.factor:.4g}) before their loss scale "
            f"{self.scale:g} was taken out; weights are freed of it"
        )


def scaled_clip(cases: Sequence[Case], data: StepData, norms: StepNorms) -> ScaledClip | None:
    """The clip by hand of scaled gradients among the cases of a step, when one surely is."""
    for case in cases:
        culprit = case.culprit
        found = _unscaled_last(case, data) if case.scaled_alike else None
        norm = norm_afterwards(case, data, norms) if found is not None else None
        if found is None or norm is None or not culprit.factor:
            continue
        scale, by_hand = found
        tolerance = error_of(case, norms)
        if culprit.factor < 1 and is_round(norm * scale, tolerance) and not is_round(norm, tolerance, DIGITS):
            event = culprit.write or culprit.event
            max_norm = float(f"{norm * scale:.1e}")
            return ScaledClip(max_norm, culprit.factor, scale, by_hand, event, culprit.rank, tuple(case.ranks))
    return None


def _unscaled_last(case: Case, data: StepData) -> tuple[float, bool] | None:
    """The scale that is taken out of all gradients of an unrecorded change by the last of what was recorded there, and
    whether a line of the trainer's own does; None where something else is the last."""
    if case.culprit.before is None:
        return None
    rank = rank_of(data, case.culprit.before)
    missed = params_on(data, case.held, rank)
    scales: set[tuple[float, bool]] = set()
    for event in reversed(between(data, case.culprit, rank)):
        if not isinstance(event, AmpUnscale | GradWrite) or event.params is None:
            continue
        if isinstance(event, GradWrite) and event.op != SCALED:
            continue
        mine = missed & set(data.params_of(rank, event.params))
        scale = event.scale if isinstance(event, AmpUnscale) else scale_of(event)
        if mine and scale in (None, 0.0, 1.0):
            return None
        if mine and scale is not None:
            scales.add((scale, isinstance(event, GradWrite)))
            missed -= mine
    return scales.pop() if len(scales) == 1 and not missed else None
