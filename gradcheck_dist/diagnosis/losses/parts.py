"""One loss over a large batch that several passes evaluate, each with gradients for a part of it.

A contrastive loss needs the features of the whole batch. Where their activations do not fit, one part after the other
is computed with gradients and set among features without (open_clip's `--accum-freq`; Gao et al. 2021, GradCache, do
so once). Every pass has the same loss, and the gradients of all add up to that of one: its samples count once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions
from gradcheck_dist.ledger.expected import expected_weights
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import StepData

LEAST = 1e-5
"""Values of one loss, computed out of batches of other shapes, lie nearer to one another than this, relative."""
ALIKE = 1e-2
"""Gradients of parts differ by more than this, relative; those of one batch that is evaluated twice by rounding."""


def parts_of_one_loss(data: StepData, contributions: Contributions) -> list[list[ContributionKey]]:
    """Groups of passes of one rank, two or more in each, in which one loss of the same labels had one value and other
    gradients."""
    alike: dict[tuple[int, int, int], list[Contribution]] = defaultdict(list)
    for key, one in contributions.by_key.items():
        if one.label_hash is not None and one.num_tokens and one.value is not None and np.isfinite(one.value):
            alike[key[0], one.label_hash, one.num_tokens].append(one)
    groups = [[one.key for one in of] for of in alike.values() if len(of) > 1 and have_one_value(of)]
    return [group for group in groups if have_other_gradients(data, contributions, group)]


def counted_once(
    objective: str, tokens: dict[ContributionKey, int], groups: Sequence[Sequence[ContributionKey]]
) -> dict[ContributionKey, Fraction]:
    """What each contribution should weigh where the tokens of a group are those of each of its members."""
    first = {key: group[0] for group in groups for key in group}
    counted = {key: count for key, count in tokens.items() if first.get(key, key) == key}
    weights = expected_weights(objective, counted)
    return {key: weights[of] for key in tokens if (of := first.get(key, key)) in weights}


def have_one_value(members: list[Contribution]) -> bool:
    """Whether the losses of all of them came to one value, as far as values were recorded."""
    values = [one.value for one in members if one.value is not None]
    epsilon = max(EPSILON.get(one.loss.dtype, 0.0) if one.loss is not None else 0.0 for one in members)
    return not values or bool(max(values) - min(values) <= max(LEAST, 2 * epsilon) * abs(max(values, key=abs)))


def have_other_gradients(data: StepData, contributions: Contributions, group: list[ContributionKey]) -> bool:
    """Whether most parameters got another gradient in each pass of a group."""
    votes: list[bool] = []
    for of_param in data.tracks.values():
        for rank, track in of_param.items():
            if contributions.coordinate.get(rank, rank) == group[0][0]:
                leaves = [track.leaves[key[1:]][1].data for key in group if key[1:] in track.leaves]
                votes += [_differ(leaves[0], leaf) for leaf in leaves[1:]]
    return 2 * sum(votes) > len(votes)


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    held = np.isfinite(one) & np.isfinite(other)
    size = np.linalg.norm(one[held]) + np.linalg.norm(other[held])
    return bool(np.linalg.norm(one[held] - other[held]) > ALIKE * size)
