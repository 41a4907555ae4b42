"""Start ranks on this machine with torch's own elastic launcher, without importing torch once per rank.

A fork server imports torch once; the elastic agent and the ranks of this and of later launches are forked from it. The
calling process never imports torch, keeps its signal handlers, and may call from any thread.

    caller --starts--> agent (torch elastic) --starts--> ranks          all of them forked by the server
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer import worker

PRELOAD = (
    "torch.distributed",
    # The first optimizer step imports torch._dynamo (1 s in torch 2.13), which no rank should pay alone. What FSDP2 and
    # pipelining need beside it is then nearly free.
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "gradcheck_dist.trainer.elastic",
    "gradcheck_dist.trainer.loop",
    "gradcheck_dist.probes.session",
    "gradcheck_dist.probes.all_probes",
)
"""Modules that the fork server imports before it forks the first rank."""

_PORT_CLASH = ("EADDRINUSE", "ddress already in use")
_ATTEMPTS = 3
_AGENT_GRACE_S = 15.0  # beyond timeout_s, for starting and for stopping
_STOP_S = 8.0  # the agent gives ranks 3 s to end before it kills them
_LOG_TAIL_CHARS = 2000


def warm_up(preload: tuple[str, ...] = ()) -> None:
    """Start the fork server in the background; returns at once, costs the caller no torch import, may be called twice.

    Ranks see the environment variables of this moment.

    Args:
        preload: further modules that every rank will need, imported beside `PRELOAD`. Has an effect in the first call
            only. They must not start threads, for ranks are forked after the import.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD, *preload])
    with _hidden_main(), _server_environment(), _ctrl_c_held_back():
        multiprocessing.forkserver.ensure_running()


def launch(
    target: str,
    args: tuple[Any, ...],
    nproc: int,
    *,
    timeout_s: float = 300.0,
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a function on `nproc` ranks of this machine and wait for them.

    Each rank finds the environment that torchrun gives (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), runs
    on one CPU thread unless OMP_NUM_THREADS says otherwise, and dies with this process.

    Args:
        target: "module:function", importable in a new process; called as function(*args).
        args: picklable; nothing out of `__main__`, which ranks do not import.
        nproc: number of ranks.
        timeout_s: seconds after which every rank writes its stacks into its log and ends.
        log_dir: folder for rank_<r>.stdout.log, rank_<r>.stderr.log and agent.log; by default a temporary one, which is
            removed when all went well.
        env: further environment variables of the ranks.

    Returns:
        what the function returned (picklable), by rank.

    Raises:
        GradcheckError: a rank raised (E231), died (E232) or ran out of time (E233): the message names the rank and ends
            with its log, and the other ranks are gone. A GradcheckError of a rank comes as it is. Or the ranks could
            not be started (E230), or the arguments are unusable (E234).
        KeyboardInterrupt: after the ranks are gone.

    Source: torch.distributed.launcher.api (elastic_launch), start method "forkserver".
    """
    if nproc < 1:
        raise GradcheckError(f"number of processes is {nproc}; legal values are integers from 1 up.", code="E234")
    try:
        payload = pickle.dumps((target, args, dict(env or {})))
    except Exception as error:
        raise GradcheckError(
            f"the arguments of {target} cannot be sent to another process: {error}. Pass plain values.", code="E234"
        ) from error
    folder = Path(log_dir or tempfile.mkdtemp(prefix="gradcheck_")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(_ATTEMPTS):
        outcome = _launch_once(payload, nproc, timeout_s, folder)
        if not (isinstance(outcome, str) and any(words in outcome for words in _PORT_CLASH)):
            break
    if isinstance(outcome, worker.RankFailure):
        raise _rank_error(outcome, nproc, timeout_s, folder)
    if isinstance(outcome, str):
        raise GradcheckError(f"could not start {nproc} processes: {outcome}. Logs are in {folder}.", code="E230")
    if log_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    return [pickle.loads(outcome[rank]) for rank in range(nproc)]


def _launch_once(payload: bytes, nproc: int, timeout_s: float, folder: Path) -> worker.Outcome:
    for rank in range(nproc):
        worker.error_path(folder, rank).unlink(missing_ok=True)
    warm_up()
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    agent = context.Process(target=worker.run_agent, args=(sender, payload, nproc, timeout_s, str(folder)))
    try:
        with _hidden_main():
            agent.start()
        sender.close()
        outcome = _receive(receiver, timeout_s)
        agent.join(_STOP_S)
        return outcome
    finally:
        receiver.close()
        if agent.pid is not None and agent.is_alive():
            agent.terminate()  # it stops its ranks first
            agent.join(_STOP_S)
            if agent.is_alive():
                agent.kill()  # its ranks notice and end
                agent.join()


def _receive(receiver: Connection, timeout_s: float) -> worker.Outcome:
    try:
        if receiver.poll(timeout_s + _AGENT_GRACE_S):
            return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        return "the launcher ended without a word, see agent.log"
    return f"no rank ended within timeout_s={timeout_s:g} seconds"


def _rank_error(failure: worker.RankFailure, nproc: int, timeout_s: float, folder: Path) -> GradcheckError:
    """What to tell the user: the rank that failed first, not one that only lost its peer."""
    rank, exit_code = failure.rank, failure.exit_code
    notes = worker.read_errors(folder, nproc)
    if rank in notes:
        # Whoever raised first is the cause; the others saw their connection break.
        rank = min(notes, key=lambda candidate: notes[candidate]["time_s"])
        note = notes[rank]
        if note["code"]:
            return GradcheckError(note["message"], code=note["code"])
        what, code = f"raised {note['type']}: {note['message'].strip()}", "E231"
    elif worker.timed_out(folder, rank):
        what, code = f"ran past timeout_s={timeout_s:g} seconds", "E233"
    elif exit_code < 0:
        what, code = f"was killed by {signal.Signals(-exit_code).name}", "E232"
    else:
        what, code = f"ended with exit code {exit_code}", "E232"
    log, tail = worker.log_path(folder, rank, "stderr"), worker.read_log(folder, rank)[-_LOG_TAIL_CHARS:]
    message = f"rank {rank} of {nproc} {what}; the other ranks were stopped. Its log is {log}"
    if crash := worker.read_crash(folder, rank):
        return GradcheckError(f"{message} and says:\n{crash[:_LOG_TAIL_CHARS].strip()}", code=code)
    return GradcheckError(f"{message} and ends:\n{tail}" if tail else f"{message} (empty).", code=code)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep new processes from importing the caller's `__main__`: without a guard it would start the job again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """OpenMP reads its thread count once, when the fork server loads it."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """A terminal sends Ctrl-C to the fork server too, which would tell where in its imports it was. It ends with us."""
    resource_tracker.ensure_running()  # where it is started later, it lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
