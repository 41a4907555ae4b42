"""The way of a contribution over the ranks, read off the replayed ledger: from where it arrived to who holds it."""

from __future__ import annotations

from collections import deque

import numpy as np

from gradcheck_dist.ledger.buffers import Entry, Replay, Stretch

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
    own = replay.stretch(start, first)
    if start == holder:
        return own.entries, False
    ways: dict[int, list[Entry]] = {start: []}
    since = {start: own}
    todo = deque([start])
    while todo:
        rank = todo.popleft()
        entries, sent = since[rank].entries, since[rank].sent
        # Who is sought first: the others are asked where it has to go on over them.
        for other in dict.fromkeys((holder, *sent)) if holder in sent else sent:
            received = None if other in ways else _received(replay, column, rank, other)
            if received is None:
                continue
            ways[other] = [*ways[rank], *entries[: sent[other]]]
            since[other] = received
            if other == holder:
                return [*ways[other], *received.entries], True
            todo.append(other)
    return own.entries, False


def _received(replay: Replay, column: int, sender: int, rank: int) -> Stretch | None:
    """What happened on a rank from the reduction on that brought it a contribution from another one."""
    history = replay.history(rank)
    for index in replay.brought(rank).get(sender, ()):
        if history[index].nominal[column] != 0:
            return replay.stretch(rank, index)
    return None


def contains(entry: Entry, column: int) -> bool:
    """Whether some of a contribution is in a buffer, by the records or by what was measured."""
    value = entry.nominal[column]
    if not np.isnan(value) and value != 0:
        return True
    if not entry.sampled or entry.observed is None or entry.stderr is None:
        return False
    return bool(abs(entry.observed[column]) > max(SAME * entry.largest, 6 * entry.stderr[column]))
