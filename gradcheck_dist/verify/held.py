"""What several ranks hold alike, and how often it counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from gradcheck_dist.verify.inner import Terms
from gradcheck_dist.verify.pieces import same

ONE_GRADIENT = 1e-5
"""Relative difference up to which ranks got one gradient."""


def held_alike(key: str, told: dict[int, dict[str, Any]]) -> list[list[int]]:
    """The ranks by what they hold of a variable."""
    groups: list[list[int]] = []
    for rank, fact in told.items():
        mine = fact["variables"][key]
        group = next((one for one in groups if same(mine, told[one[0]]["variables"][key])), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return groups


def one_by_one(holders: Sequence[list[list[int]]], projected: Mapping[int, Sequence[float]]) -> float:
    """The derivative where what ranks hold alike counts once if they got one gradient of it, and as summands if
    they got others: biases that begin as zeros are shards in one layer and copies in the next.

    Args:
        holders: of each variable, the ranks by what they hold of it.
        projected: by rank, the inner products of each variable's gradient and its direction.
    """
    total = 0.0
    for index, groups in enumerate(holders):
        for ranks in groups:
            values = [projected[rank][index] for rank in ranks]
            one = max(values) - min(values) <= ONE_GRADIENT * max(map(abs, values))
            total += sum(values) / (len(values) if one else 1)
    return total


def held_once(told: list[dict[str, Any]]) -> bool:
    """Whether every output is on one rank alone."""
    seen = [output[0] for fact in told for output in fact["outputs"]]
    return not any(same(one, other) for one, other in combinations(seen, 2))


def shares(function: Terms, own: dict[str, Any], told: list[dict[str, Any]]) -> tuple[bool, tuple[list[float], ...]]:
    """Let what several ranks hold count once; tells whether all ranks hold all of it alike, and the fingerprints of
    outputs that are the same on ranks where different gradients of them arrived."""
    whole, torn = True, []
    for fact in told:
        for index, mine in enumerate(fact["outputs"]):
            if mine is None:
                continue
            held = [other for one in told if (other := one["outputs"][index]) is not None and same(mine[0], other[0])]
            alike = sum(same(mine[1], gradient) for _, gradient in held)
            if fact is own:
                function.share[index] = 1 / alike
            if alike < len(held):
                torn.append(mine[0])
            whole &= alike == len(told)
    return whole, tuple(torn)
