"""Losses over shards of the vocabulary whose softmax does not sum to 1 over all shards.

A maximum or a denominator that is not shared by the ranks, or is averaged, is one wrong number on all of them: losses
agree, and so do weights. What backward gives is the gradient of another function.
"""

from __future__ import annotations

from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.ledger.vocabulary_shards import shards_of_vocabularies
from gradcheck_dist.wording import numbered

NO_DISTRIBUTION = "their softmax does not sum to 1"


def no_distribution(data: StepData) -> tuple[list[str], list[str]]:
    """Why a step is left open in which a loss function's softmax sums to another number, one reason a function; and to
    which."""
    reasons: dict[str, str] = {}
    sums: list[str] = []
    for one in shards_of_vocabularies(data.events):
        function = one.first.function
        if function in reasons or not one.sums_to_another:
            continue
        called = f" (called at {one.first.site.short})" if one.first.site else ""
        ranks = numbered("rank", one.events)
        reasons[function] = (
            f"the losses of {function}{called} over shards of the vocabulary on {ranks} are no cross-entropies: "
            f"{NO_DISTRIBUTION} over all shards. A sum or a maximum of the ranks' logits is missing, or averaged, and "
            "what backward gives is the gradient of another function"
        )
        low, high = f"{one.sums.min():.4g}", f"{one.sums.max():.4g}"
        sums.append(
            f"step {data.step}: the softmax of {function} sums to {low if low == high else f'{low} to {high}'} "
            f"over the shards of {ranks}"
        )
    return list(reasons.values()), sums
