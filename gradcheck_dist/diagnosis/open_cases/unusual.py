"""Weights of losses that count nothing, unlike most others, to which nothing was done that anybody saw."""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.ledger.tracks import StepData


def unusual(case: Case, data: StepData) -> str | None:
    """Why such weights accuse no loss: they are told in the loss's own gradients, which cannot differ from themselves,
    and what most weights have is only what they are compared with."""
    if not case.context.relative or case.culprit.kind != "loss" or case.culprit.unrecorded:
        return None
    return (
        f"some gradients are x {case.pattern.factor:.6g} of what others are that the same losses brought, and came as "
        "recorded operations say, so what was done to the others may be what is wrong. "
        "gradcheck_dist.mark_loss(loss_sum, num_samples) where the loss is computed tells which are right"
    )
