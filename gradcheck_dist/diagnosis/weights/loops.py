"""Backward passes of one loop, which do the same to the same parameters one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradcheck_dist.ledger.contributions import Contribution, Contributions
from gradcheck_dist.ledger.tracks import StepData


def one_loop(data: StepData, contributions: Contributions) -> bool:
    """Whether all passes begin on one line, or in branches of one condition, and reach the same parameters."""
    sites = {
        (c.gradient.site.file, c.gradient.site.line) if c.gradient is not None and c.gradient.site else None
        for c in contributions.by_key.values()
    }
    reached: Mapping[int, set[frozenset[tuple[int, int]]]] = {rank: set() for rank in data.events}
    for tracks in data.tracks.values():
        for rank, track in tracks.items():
            if track.leaves:
                reached[rank].add(frozenset(track.leaves))
    together = len(sites) == 1 or are_branches(contributions.by_key.values())
    return together and None not in sites and all(len(kinds) <= 1 for kinds in reached.values())


def are_branches(contributions: Iterable[Contribution]) -> bool:
    """Whether each pass's mean or sum of a loss that counts nothing was looked at: only where the pass before it was
    called from the same place, or from another branch that does the same, it is (`probes/recording/branches.py`)."""
    return all(
        c.label_hash is None and c.gradient is not None and c.gradient.mean_weight is not None for c in contributions
    )
