"""Ranks read side by side: shares of the ranks in processes of their own, each a round ahead at most."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream.summaries import READ_BYTES, BlockReader, KnownShapes, Round, rounds
from gradcheck_dist.trace.store import Place, size_of

WORTH_BYTES = 1 << 30
"""A run smaller than this is read before another process has started."""


def read_shares(
    files: dict[int, Place],
    objective: str,
    jobs: int,
    read_bytes: int = READ_BYTES,
    make: Callable[[Place, KnownShapes], BlockReader] = BlockReader,
) -> Iterator[tuple[int, Round]]:
    """The rounds of all shares of the ranks in turn, as (share, round).

    Raises:
        GradcheckError: E411 a reading process ended before its time.
    """
    num_bytes = sum(size_of(path) for path in files.values())
    jobs = min(jobs, len(files))
    if jobs < 2 or num_bytes < WORTH_BYTES:
        yield from ((0, told) for told in rounds(files, objective, read_bytes, make))
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
                    yield share, told


def _serve(
    files: dict[int, Place],
    objective: str,
    read_bytes: int,
    make: Callable[[Place, KnownShapes], BlockReader],
    send: Connection,
) -> None:
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        for told in rounds(files, objective, read_bytes, make):
            send.send(told)
        send.send(None)
