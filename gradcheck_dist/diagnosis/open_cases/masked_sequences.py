"""Sequences of which every token is masked: they count in a batch, and nothing of them enters a loss."""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.ledger.tracks import StepData

EXACT = 1e-4
VAGUE = 0.02
"""Sequences: with less certainty, any number is near to a whole one."""


def masked_sequences(case: Case, data: StepData) -> str | None:
    """Why a division by more sequences than enter the losses accuses nobody: others may be masked as a whole."""
    context, factor = case.context, case.pattern.factor
    seen = context.contributions.num_tokens
    if not context.of_samples or case.names or case.pattern.kind != "uniform" or not seen or not 0 < factor < 1:
        return None
    counted = seen / factor
    width = max(2 * counted * case.pattern.tolerance, EXACT)
    if width > VAGUE or abs(counted - round(counted)) > width:
        return None
    return (
        f"the losses are divided by {round(counted)} sequences, and tokens of {seen} enter them: right where the "
        "others are masked as a whole (too long, left out), and count in the batch"
    )
