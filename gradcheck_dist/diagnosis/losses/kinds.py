"""Passes whose labels are of one class each: kinds of data (real and generated, source and target), not of one batch.

A discriminator that is trained by a cross-entropy goes backward once for each kind of data, and adds up such losses by
design. Batches of one class look the same, so the verdict stays open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.several_losses import OwnMeans, fits, usual
from gradcheck_dist.diagnosis.losses.tasks import DECLARE
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.expected import expected_weights
from gradcheck_dist.trace.label_hashes import one_class


def kind_by_kind(target: Aim, objective: str, measured: list[Held]) -> OwnMeans | None:
    """What the weights are compared with where each pass's labels are all of one class, of several on each rank, and
    one mean over all tokens does not fit; None where that is not so."""
    kinds: dict[int | None, list[ContributionKey]] = defaultdict(list)
    for key, one in target.contributions.by_key.items():
        if target.tokens.get(key):
            kinds[one_class(one.loss.num_labels if one.loss is not None else None, one.label_hash)].append(key)
    if target.relative or None in kinds or not _has_each_rank_several(list(kinds.values())):
        return None
    if fits(measured, target.contributions, target.expected):
        return None
    scaled: dict[ContributionKey, Fraction] = {}
    shares = []
    for keys in kinds.values():
        own = expected_weights(objective, {key: target.tokens[key] for key in keys})
        shares.append(usual(measured, target.contributions, own, keys))
        scaled |= {key: weight * Fraction(shares[-1]) for key, weight in own.items()}
    reason = (
        f"the labels of each pass are of one class, as those of a discriminator's kinds of data are. Passes of one "
        f"class weigh {' and '.join(f'x {share:.4g}' for share in shares)} of a mean over their own tokens: right "
        f"where these are losses of their own, too much where they are parts of one batch. {DECLARE}"
    )
    return OwnMeans(replace(target, expected=target.filled(scaled)), reasons=[reason])


def _has_each_rank_several(kinds: Sequence[Sequence[ContributionKey]]) -> bool:
    ranks = [{key[0] for key in keys} for keys in kinds]
    return len(kinds) > 1 and all(of_kind == ranks[0] for of_kind in ranks)
