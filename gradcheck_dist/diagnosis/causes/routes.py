"""The way of a contribution over the ranks, read off the replayed ledger: from where it arrived to who holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.buffers import Entry, Replay

SAME = 1e-3
"""Factors nearer to 1 than this are 1; measured ones are allowed their own noise besides."""


def origin(replay: Replay, column: int, holder: int) -> int:
    """The rank on which a contribution's gradient arrived: of several with the same one (tensor parallel), the holder
    itself, else one from which a reduction brought it to the holder."""
    ranks = replay.basis.ranks_of.get(column, [])
    if holder in ranks:
        return holder
    sources = replay.brought(holder)
    return next((rank for rank in ranks if rank in sources), replay.basis.origin[column])


def route(replay: Replay, column: int, start: int, holder: int) -> tuple[list[Entry], bool]:
    """The entries that concern a contribution: on the rank where it starts until a reduction carried it over, on as
    many further ranks as it went through (a reduction over cp, then one over dp), then on the holder.

    The second value tells whether recorded reductions carried it. Of several ways the one over the fewest ranks.
    """
    first = next((i for i, entry in enumerate(replay.history(start)) if contains(entry, column)), None)
    if first is None:
        return [], False
    own = replay.followed(start, first)
    if start == holder:
        return own, False
    ways: dict[int, list[Entry]] = {start: []}
    since = {start: own}
    todo = deque([start])
    while todo:
        rank = todo.popleft()
        # Who is sought first: the others are asked where it has to go on over them.
        for sought in (True, False):
            for index, other in _sent_to(since[rank]):
                if other in ways or (other == holder) != sought:
                    continue
                received = _received(replay, column, rank, other)
                if received is None:
                    continue
                ways[other] = [*ways[rank], *since[rank][:index]]
                since[other] = received
                if sought:
                    return [*ways[other], *received], True
                todo.append(other)
    return own, False


def _sent_to(entries: list[Entry]) -> Iterator[tuple[int, int]]:
    """Each reduction's index, with each rank that took part in it."""
    for index, entry in enumerate(entries):
        if isinstance(entry.event, Reduce):
            # What was sent to one rank only leaves no sources behind where it came from.
            for other in entry.sources or ((entry.event.root,) if entry.event.root is not None else ()):
                yield index, other


def _received(replay: Replay, column: int, sender: int, rank: int) -> list[Entry] | None:
    """The entries of a rank from the reduction on that brought it a contribution from another one."""
    history = replay.history(rank)
    for index in replay.brought(rank).get(sender, ()):
        if history[index].nominal[column] != 0:
            return replay.followed(rank, index)
    return None


def contains(entry: Entry, column: int) -> bool:
    """Whether some of a contribution is in a buffer, by the records or by what was measured."""
    value = entry.nominal[column]
    if not np.isnan(value) and value != 0:
        return True
    if not entry.sampled or entry.observed is None or entry.stderr is None:
        return False
    return bool(abs(entry.observed[column]) > max(SAME * entry.largest, 6 * entry.stderr[column]))
