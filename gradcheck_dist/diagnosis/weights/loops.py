"""Backward passes of one loop, which do the same to the same parameters one after the other."""

from __future__ import annotations

from collections.abc import Mapping

from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import StepData


def one_loop(data: StepData, contributions: Contributions) -> bool:
    """Whether all passes begin on one line and reach the same parameters."""
    sites = {
        (c.gradient.site.file, c.gradient.site.line) if c.gradient is not None and c.gradient.site else None
        for c in contributions.by_key.values()
    }
    reached: Mapping[int, set[frozenset[tuple[int, int]]]] = {rank: set() for rank in data.events}
    for tracks in data.tracks.values():
        for rank, track in tracks.items():
            if track.leaves:
                reached[rank].add(frozenset(track.leaves))
    return len(sites) == 1 and None not in sites and all(len(kinds) <= 1 for kinds in reached.values())
