"""Sums over the tokens of a batch's parts, added up: one loss, whose sum nothing multiplies."""

from __future__ import annotations

from collections.abc import Iterable

from gradcheck_dist.diagnosis.weights.degrees import same
from gradcheck_dist.events import Loss, LossGradient


def are_bare_sums(losses: Iterable[tuple[LossGradient, Loss | None]]) -> bool:
    """Whether losses are sums over tokens, of one line, that nothing multiplies in the sum of all of them, beside none
    of another kind: the chunks of a batch have no coefficients."""
    lines = set[tuple[str, object]]()
    for gradient, loss in losses:
        bare = gradient.whole and same(gradient.weight / gradient.whole, 1) and not gradient.other_losses
        if loss is None or loss.reduction == "mean" or not bare:
            return False
        lines.add((loss.op, loss.site))
    return len(lines) == 1
