"""Losses whose weight is told with what hooks on activations behind them multiplied by."""

from __future__ import annotations

from gradcheck_dist.events import LossGradient, LossTerm
from gradcheck_dist.ledger.tracks import StepData


def told_hooks(data: StepData) -> list[str]:
    """In words, where there are such hooks."""
    found = {
        (f"{event.hooks_factor:.6g}", event.hooks_site.short if event.hooks_site is not None else None)
        for of_rank in data.events.values()
        for event in of_rank
        if isinstance(event, LossGradient | LossTerm) and event.hooks_factor not in (None, 1)
    }
    if not found:
        return []
    factors = sorted({factor for factor, _ in found})
    sites = sorted({site for _, site in found if site is not None})
    by = (
        f"hooks on activations, or functions that hand these on ({', '.join(sites[:2])}),"
        if sites
        else "backward hooks of modules"
    )
    return [
        f"{by} multiply all gradients of a pass by {', '.join(factors[:3])} behind its loss: weights at the loss are "
        "told with that"
    ]
