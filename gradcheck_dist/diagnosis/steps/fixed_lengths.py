"""Sums over tokens that one fixed length for each sequence divides, as Dr. GRPO's (arXiv:2503.20783) do on purpose."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.rules import gs303_wrong_normalizer as wrong_normalizer
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.wording import numbered

LONGER = 2
"""Tokens. A count of labels before their shift is longer than a sequence by one."""
VAGUE = 0.1
"""Tokens. A length that is known no better is a whole number by chance."""


def leave_fixed_lengths_open(verdicts: Sequence[StepVerdict]) -> None:
    """Take such a length for one that may be meant, where nobody declared an objective: in every step all tokens weigh
    alike, and the losses are divided by their sequences times one whole number, the same in steps whose tokens are not
    as many for each sequence. It is longer than any row; padding to the longest is a fault, and stays one."""
    lengths = [length for verdict in verdicts if (length := _length(verdict)) is not None]
    factors = {round(finding.factor.observed or 0.0, 4) for verdict in verdicts for finding in verdict.errors}
    if len(lengths) < max(len(verdicts), 2) or len(set(lengths)) > 1 or len(factors) < 2:
        return
    for verdict in verdicts:
        for finding in verdict.errors:
            verdict.take_away(finding)
    verdicts[0].reasons.append(
        f"{numbered('step', [verdict.context.step for verdict in verdicts])}: all tokens weigh alike, and are divided "
        f"by {lengths[0]} for each sequence, which is longer than any: one fixed length may be meant (Dr. GRPO), and a "
        "count of padding is wrong. gradcheck_dist.mark_loss(loss_sum / length, num_sequences) tells the first, "
        "--objective global-token-mean the second"
    )


def _length(verdict: StepVerdict) -> int | None:
    """By how many tokens for each sequence the losses of a step are divided, where that is all that is wrong in it."""
    errors, by_key = verdict.errors, verdict.contributions.by_key
    shape = verdict.shape_of(errors[0]) if len(errors) == 1 and errors[0].code == wrong_normalizer.CODE else None
    if shape is None or shape.kind != "uniform" or not 0 < shape.factor < 1:
        return None
    if not verdict.context.objective_from.startswith("assumed") or not verdict.contributions.num_tokens:
        return None
    longest = 0
    for one in by_key.values():
        if one.samples is None or one.samples.parts:
            return None
        labels = one.loss.num_labels or 0 if one.loss is not None else 0
        longest = max(longest, one.samples.longest, labels // one.samples.num)
    sequences = sum(one.samples.num for one in by_key.values() if one.samples is not None)
    found = verdict.contributions.num_tokens / shape.factor / sequences
    known_to = shape.tolerance * found
    whole = known_to <= VAGUE and abs(found - round(found)) <= known_to
    return round(found) if whole and round(found) >= longest + LONGER else None
