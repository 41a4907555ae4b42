"""Losses that follow a mean over samples (sequences): each weighs alike, whatever the number of its tokens.

Batches of sequences of one length, another length in each, make weights that no count of tokens explains. Where all
weights together come to one mean, each contribution holds a whole number of equal shares, and its tokens are a multiple
of that number, these are its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.contributions import ContributionKey

EXACT = 1e-5
"""Relative: how near to whole numbers shares must be."""


def mean_over_samples(case: Case, judged: Sequence[Held], tokens: Mapping[ContributionKey, int]) -> str | None:
    """Why a case at the loss is left open: its weights are those of a mean over samples. None where they are not."""
    if case.culprit.kind != "loss" or case.culprit.unrecorded:
        return None
    shares = _shares(judged, tokens)
    if shares is None or abs(sum(shares.values()) - 1) > EXACT:
        return None
    if max(shares.values()) - min(shares.values()) <= EXACT:
        return None  # a mean of means, of which another rule tells
    for num_samples in range(len(shares), sum(tokens.values())):
        counts = {key: round(share * num_samples) for key, share in shares.items()}
        if all(_fits(shares[key] * num_samples, count, tokens[key]) for key, count in counts.items()):
            least, most = min(counts.values()), max(counts.values())
            return (
                f"the weights are those of a mean over {num_samples} samples (sequences), or a multiple of these, "
                f"{least} to {most} in a contribution, that weigh alike whatever the number of their tokens: right "
                "where that is meant. gradcheck_dist.mark_loss(loss_sum, num_samples) where the loss is computed tells"
            )
    return None


def _fits(share: float, count: int, num_tokens: int) -> bool:
    return count > 0 and abs(share - count) <= EXACT * count and num_tokens % count == 0


def _shares(judged: Sequence[Held], tokens: Mapping[ContributionKey, int]) -> dict[ContributionKey, float] | None:
    """Of the whole gradient, by contribution; None where one is not known, or parameters differ."""
    ratios: dict[ContributionKey, float] = {}
    for held in judged:
        for cell in held.cells:
            if abs(ratios.setdefault(cell.key, cell.ratio) - cell.ratio) > max(cell.margin, EXACT):
                return None
    total = sum(tokens.values())
    if ratios.keys() != tokens.keys() or not total:
        return None
    return {key: ratios[key] * count / total for key, count in tokens.items()}
