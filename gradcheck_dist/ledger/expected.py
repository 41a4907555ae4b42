"""The expected ledger: what each contribution's weight per token should be, as exact rationals.

With n_c tokens in contribution c, N = sum of all n_c, C contributions, D data coordinates and N_d tokens on
coordinate d:

    global-token-mean   1 / N
    microbatch-mean     1 / (C n_c)
    rank-token-mean     1 / (D N_d)
    sum                 1
    sequence-mean       1 / N, with sequences in the place of tokens
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction

from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.objectives import DEFAULT_OBJECTIVE, check_objective

Tokens = Mapping[ContributionKey, int]
Weights = dict[ContributionKey, Fraction]


def _global_token_mean(tokens: Tokens) -> Weights:
    total = sum(tokens.values())
    return {key: Fraction(1, total) for key in tokens}


def _microbatch_mean(tokens: Tokens) -> Weights:
    return {key: Fraction(1, len(tokens) * count) for key, count in tokens.items()}


def _rank_token_mean(tokens: Tokens) -> Weights:
    of_rank: dict[int, int] = {}
    for (data_rank, _, _), count in tokens.items():
        of_rank[data_rank] = of_rank.get(data_rank, 0) + count
    return {key: Fraction(1, len(of_rank) * of_rank[key[0]]) for key in tokens}


def _sum(tokens: Tokens) -> Weights:
    return dict.fromkeys(tokens, Fraction(1))


OBJECTIVES: dict[str, Callable[[Tokens], Weights]] = {
    "global-token-mean": _global_token_mean,
    "microbatch-mean": _microbatch_mean,
    "rank-token-mean": _rank_token_mean,
    "sum": _sum,
    "sequence-mean": _global_token_mean,
}
TOTALS = frozenset({DEFAULT_OBJECTIVE, "sequence-mean"})
"""Objectives by which all that a step counts, on all ranks, weighs alike."""


def expected_weights(objective: str, tokens: Tokens) -> Weights:
    """Weights per token; contributions without any valid token get none (they cannot matter).

    Args:
        tokens: number of valid tokens of each contribution.
    """
    counted = {key: count for key, count in tokens.items() if count > 0}
    return OBJECTIVES[check_objective(objective)](counted) if counted else {}


def expected_apart(objective: str, tokens: Tokens, models: Iterable[Collection[ContributionKey]]) -> Weights:
    """The same where several models train that have no parameter in common: each one's contributions have an objective
    of their own."""
    found: Weights = {}
    for model in models:
        found |= expected_weights(objective, {key: count for key, count in tokens.items() if key in model})
    return found
