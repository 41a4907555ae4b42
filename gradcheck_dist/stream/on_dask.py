"""The same judgement on a Dask cluster: its workers read the run where it lies, and only places and results travel.

A share of the ranks is read forwards by one worker; what it tells is put together here, step by step, and the steps are
judged wherever there is room. A worker holds one piece of a share (as cursor.py reads it) and one step, or 4 MiB of
small ones, at a time. Each piece of work can be done again from its description, so that a lost worker is replaced.

Dask pickles what its own processes send each other: descriptions of work, decoded records and verdicts. Nothing that
stands in a trace is unpickled. Whoever reaches a Dask scheduler can run code on its workers: to guard it is Dask's
business (its TLS settings).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gradcheck_dist import __version__
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream.cursor import RunCursor
from gradcheck_dist.stream.placed import Listening, ToldRun, batches, judge_batch, tell
from gradcheck_dist.stream.summaries import MakeReader, Round, rounds
from gradcheck_dist.stream.workers import Verdicts, Wanted
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import Place, RemotePath, Where, size_of

if TYPE_CHECKING:
    from distributed import Client, Future

LOCAL = "local"
CONNECT_S = 20
MAX_STREAMS = 64
"""Readers that a worker keeps; of one that was dropped the file is read again."""
Answer = TypeVar("Answer")


@contextlib.contextmanager
def on_dask(address: str, jobs: int) -> Iterator[DaskWorkers]:
    """The workers of a cluster.

    Args:
        address: "local" for a cluster on this machine that lives as long as the context; else that of a scheduler, as
            tcp://host:8786, or the path of its scheduler file, ending in .json.
        jobs: processes of a local cluster.

    Raises:
        GradcheckError: E412 Dask is not installed, E413 no scheduler answers, or it has no workers.
    """
    try:
        import dask
        import distributed
    except ImportError as error:
        raise GradcheckError(
            "--dask needs Dask, which is not installed. Install it with `pip install 'gradcheck-dist[dask]'` here and "
            "where the workers run, or leave --dask out: this machine's cores are used without it.",
            code="E412",
        ) from error
    with contextlib.ExitStack() as stack:
        if address == LOCAL:
            # Dask looks at every worker's stack a hundred times a second otherwise.
            stack.enter_context(dask.config.set({"distributed.worker.profile.enabled": False}))
            place: dict[str, Any] = {
                "address": stack.enter_context(
                    distributed.LocalCluster(
                        n_workers=jobs, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None,
                        silence_logs=logging.CRITICAL,
                    )
                )
            }  # fmt: skip
        else:
            place = {"scheduler_file": address} if address.endswith(".json") else {"address": address}
        try:
            if "scheduler_file" in place:
                Path(address).stat()  # Dask would wait for it
            client = stack.enter_context(distributed.Client(**place, timeout=CONNECT_S, set_as_default=False))
            client.wait_for_workers(1, timeout=CONNECT_S)
        except (OSError, ValueError, TimeoutError) as error:
            raise GradcheckError(
                f"no Dask scheduler with workers answers at {address!r} within {CONNECT_S} s: {error}. Name one that "
                "runs, as tcp://host:8786 or its scheduler file, or --dask local for a cluster on this machine.",
                code="E413",
            ) from error
        yield DaskWorkers(client)


class DaskWorkers:
    """The workers of a cluster, as stream.workers.Workers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def open(self, path: Where) -> RunCursor:
        """
        Raises:
            GradcheckError: as RunCursor; E415 a worker cannot read the run, or has another version.
        """
        run = ToldRun(path, self._tell)
        file = next(iter(run.run.ranks.values())).path
        look = partial(_look, _absolute(file), size_of(file))
        for worker, answer in self._client.run(look, on_error="return").items():
            if answer != __version__:
                raise GradcheckError(
                    f"the Dask worker {worker} cannot judge {run.run.path}: {_why(answer)}. Every worker needs "
                    f"gradcheck-dist {__version__} and the run where it can read it: on a shared disk, or in a store "
                    "named by a URL.",
                    code="E415",
                )
        return run

    def read(
        self, files: dict[int, Place], objective: str, read_bytes: int, make: MakeReader
    ) -> Iterator[dict[int, Round]]:
        return self._in_step([partial(rounds, of, objective, read_bytes, make) for of in self._shares(files)])

    def judge(self, cursor: RunCursor, wanted: Wanted, objective: str, objective_from: str) -> Verdicts:
        assert isinstance(cursor, ToldRun)
        waiting: deque[Future] = deque()
        ground, sent = None, None
        try:
            for of_batch, steps in batches(cursor, wanted):
                if of_batch is not ground:
                    # By a task, not scattered: this can be done again where a worker was lost.
                    ground, sent = of_batch, self._client.submit(_same, of_batch, pure=False)
                waiting.append(self._client.submit(judge_batch, sent, steps, objective, objective_from, pure=False))
                while len(waiting) > 2 * len(self._threads()):
                    yield from self._verdicts(waiting.popleft())
            while waiting:
                yield from self._verdicts(waiting.popleft())
        finally:
            cursor.close()
            self._client.cancel(list(waiting))

    def _verdicts(self, future: Future) -> list[StepVerdict]:
        verdicts: list[StepVerdict] = _result(future)
        return verdicts

    def _tell(self, files: dict[int, Place], read_bytes: int) -> Listening:
        return self._in_step([partial(tell, of, read_bytes) for of in self._shares(files)])

    def _threads(self) -> list[str]:
        """The address of a worker for each of its threads."""
        return [address for address, count in sorted(self._client.nthreads().items()) for _ in range(count)]

    def _shares(self, files: dict[int, Place]) -> list[dict[int, Place]]:
        ranks, count = sorted(files), len(self._threads())
        return [
            {rank: _absolute(files[rank]) for rank in ranks[share::count]} for share in range(min(count, len(ranks)))
        ]

    def _in_step(self, streams: list[Callable[[], Iterator[Answer]]]) -> Generator[dict[int, Answer], None, None]:
        """What iterators give that run on workers, one round after the other; each is a round ahead at most."""
        token, threads = uuid.uuid4().hex, self._threads()

        def ask(share: int, number: int) -> Future:
            # Before what is judged: it says what there is to judge.
            return self._client.submit(
                _next, token, share, number, streams[share], workers=[threads[share % len(threads)]],
                allow_other_workers=True, pure=False, priority=10,
            )  # fmt: skip

        waiting = {share: ask(share, 0) for share in range(len(streams))}
        number = 0
        try:
            while waiting:
                number += 1
                told: dict[int, Answer] = {}
                for share, future in list(waiting.items()):
                    answer = _result(future)
                    if answer is None:
                        del waiting[share]
                    else:
                        told[share] = answer
                        waiting[share] = ask(share, number)
                yield told
        finally:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._client.cancel(list(waiting.values()))
                self._client.run(_forget, token, wait=False)


def _absolute(place: Place) -> Place:
    return place.absolute() if isinstance(place, Path) else place


def _result(future: Future) -> Any:
    """
    Raises:
        GradcheckError: E414 the cluster lost the work; E415 a worker cannot read the run; what the work raised.
    """
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError
    from distributed.comm.core import CommClosedError

    try:
        return future.result()
    except (KilledWorker, FutureCancelledError, CommClosedError) as error:
        raise GradcheckError(
            f"the Dask cluster lost a piece of work: {error}. A worker that dies again and again has too little memory "
            "for a step of all ranks: give it more, or judge without --dask.",
            code="E414",
        ) from error
    except OSError as error:
        raise GradcheckError(
            f"a Dask worker cannot read the run: {error}. Put it where every worker can: on a shared disk, or in a "
            "store named by a URL.",
            code="E415",
        ) from error


def _same(ground: Run) -> Run:
    return ground


def _look(place: Place, num_bytes: int) -> str:
    """Runs on every worker: the version there, once the run is seen to be the same."""
    found = size_of(replace(place, size=None) if isinstance(place, RemotePath) else place)
    if found != num_bytes:
        raise ValueError(f"{place} has {found} bytes there, {num_bytes} here")
    return __version__


def _why(answer: object) -> str:
    return f"{type(answer).__name__}: {answer}" if isinstance(answer, Exception) else f"it has version {answer}"


class _Stream:
    """An iterator on a worker. Whatever happens, round `number` is the same: what was lost is gone through again."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.lock = threading.Lock()
        self._make, self._source, self._number = make, make(), 0

    def round(self, number: int) -> Any:
        if number < self._number:
            self._source, self._number = self._make(), 0
        while self._number < number:
            next(self._source, None)
            self._number += 1
        self._number += 1
        return next(self._source, None)


_streams: dict[tuple[str, int], _Stream] = {}
_ended: deque[str] = deque(maxlen=1000)
_guard = threading.Lock()


def _next(token: str, share: int, number: int, make: Callable[[], Iterator[Any]]) -> Any:
    """Runs on a worker: a round of a share's iterator; None behind its end."""
    with _guard:
        if token in _ended:  # it was cancelled, and started all the same
            return None
        stream = _streams.pop((token, share), None) or _Stream(make)
        _streams[token, share] = stream
        while len(_streams) > MAX_STREAMS:
            del _streams[next(iter(_streams))]
    with stream.lock:
        return stream.round(number)


async def _forget(token: str) -> None:
    """Runs on every worker when all has been told. Nobody waits for it, since a worker may be dead."""
    with _guard:
        _ended.append(token)
        for key in [key for key in _streams if key[0] == token]:
            del _streams[key]
