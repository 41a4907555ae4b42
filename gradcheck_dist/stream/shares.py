"""Ranks read side by side: shares of the ranks in processes of their own, each a round ahead at most."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream.summaries import READ_BYTES, BlockReader, MakeReader, Round, rounds
from gradcheck_dist.trace.store import Place, size_of

ReadShares = Callable[[dict[int, Place], str, int, MakeReader], Iterator[dict[int, Round]]]
"""Reads ranks by their files, for an objective, so many bytes of each at a time, with these readers."""

WORTH_BYTES = 1 << 30
"""A run smaller than this is read before another process has started."""


def read_shares(
    files: dict[int, Place],
    objective: str,
    read_bytes: int = READ_BYTES,
    make: MakeReader = BlockReader,
    jobs: int = 1,
) -> Iterator[dict[int, Round]]:
    """One round after the other, by share of the ranks.

    Raises:
        GradcheckError: E411 a reading process ended before its time.
    """
    num_bytes = sum(size_of(path) for path in files.values())
    jobs = min(jobs, len(files))
    if jobs < 2 or num_bytes < WORTH_BYTES:
        yield from ({0: told} for told in rounds(files, objective, read_bytes, make))
        return
    context = multiprocessing.get_context("spawn")  # not forked: the caller may have threads
    ranks = sorted(files)
    with contextlib.ExitStack() as stack:
        ends: dict[int, Connection] = {}
        for share in range(jobs):
            receive, send = context.Pipe(duplex=False)
            stack.enter_context(receive)
            of_share = {rank: files[rank] for rank in ranks[share::jobs]}
            process = context.Process(target=_serve, args=(of_share, objective, read_bytes, make, send), daemon=True)
            process.start()
            send.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            ends[share] = receive
        while ends:
            told_by: dict[int, Round] = {}
            for share, receive in list(ends.items()):
                try:
                    told = receive.recv()
                except EOFError:
                    raise GradcheckError(
                        f"a process that read ranks {ranks[share]}, {ranks[share] + jobs}, ... ended before its time. "
                        "Judge with --jobs 1 to see why.",
                        code="E411",
                    ) from None
                if told is None:
                    del ends[share]
                else:
                    told_by[share] = told
            yield told_by


def _serve(
    files: dict[int, Place],
    objective: str,
    read_bytes: int,
    make: MakeReader,
    send: Connection,
) -> None:
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for told in rounds(files, objective, read_bytes, make):
            send.send(told)
        send.send(None)
