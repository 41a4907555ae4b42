"""Sums over tokens that one fixed length for each sequence divides, as Dr. GRPO's (arXiv:2503.20783) do on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradcheck_dist.diagnosis.rules import gs303_wrong_normalizer as wrong_normalizer
from gradcheck_dist.diagnosis.steps.other_steps import TOKENS_OF_OTHERS
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.wording import numbered

LONGER = 2
"""Tokens. A count of labels before their shift is longer than a sequence by one."""
VAGUE = 0.1
"""Tokens. A length that is known no better is a whole number by chance."""


class Lengths(NamedTuple):
    """Of a step: by how many tokens for each sequence its losses are divided, the tokens of its longest sequence, and
    the labels of its longest row, 0 where that is not known."""

    divides: int
    longest: int
    row: int

    @property
    def is_padding(self) -> bool:
        """Whether it is a count of all labels, also of ignored ones: once, before their shift, or on several ranks."""
        return self.row > 1 and (self.row <= self.divides < self.row + LONGER or self.divides % self.row == 0)


def leave_fixed_lengths_open(verdicts: Sequence[StepVerdict]) -> None:
    """Take such a length for one that may be meant, where nobody declared an objective: in every step all tokens weigh
    alike, and the losses are divided by their sequences times one whole number, the same in steps whose tokens are not
    as many for each. Padding, ranks that count it again, and the tokens of other steps are faults as before."""
    steps = [lengths for verdict in verdicts if (lengths := _lengths(verdict)) is not None]
    if len(steps) < max(len(verdicts), 2) or len({one.divides for one in steps}) > 1:
        return
    found = [finding for verdict in verdicts for finding in verdict.errors]
    if len({round(one.factor.observed or 0.0, 4) for one in found}) < 2:
        return  # any constant would do this
    length, longest = steps[0].divides, [one.longest for one in steps]
    if not max(longest) <= length >= min(longest) + LONGER or all(one.is_padding for one in steps):
        return
    if length > max(longest) > 1 and length % max(longest) == 0:
        return
    if all((one.factor.expression or "").startswith(TOKENS_OF_OTHERS) for one in found):
        return
    for verdict in verdicts:
        for finding in verdict.errors:
            verdict.take_away(finding)
    verdicts[0].reasons.append(
        f"{numbered('step', [verdict.context.step for verdict in verdicts])}: all tokens weigh alike, and are divided "
        f"by {length} for each sequence, in every step: one fixed length may be meant (Dr. GRPO), and a count of "
        "padding is wrong. gradcheck_dist.mark_loss(loss_sum / length, num_sequences) tells the first, --objective "
        "global-token-mean the second"
    )


def _lengths(verdict: StepVerdict) -> Lengths | None:
    """None where something else is wrong in a step than that all tokens weigh too little."""
    errors, by_key = verdict.errors, verdict.contributions.by_key
    shape = verdict.shape_of(errors[0]) if len(errors) == 1 and errors[0].code == wrong_normalizer.CODE else None
    if shape is None or shape.kind != "uniform" or not 0 < shape.factor < 1:
        return None
    if not verdict.context.objective_from.startswith("assumed") or not verdict.contributions.num_tokens:
        return None
    longest, row, sequences = 0, 0, 0
    for one in by_key.values():
        if one.samples is None or one.samples.parts:
            return None
        longest, row = max(longest, one.samples.longest), max(row, one.samples.labels // one.samples.num)
        sequences += one.samples.num
    found = verdict.contributions.num_tokens / shape.factor / sequences
    known_to = shape.tolerance * found
    whole = known_to <= VAGUE and abs(found - round(found)) <= known_to
    return Lengths(round(found), longest, row) if whole else None
