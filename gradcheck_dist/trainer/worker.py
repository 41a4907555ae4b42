"""What runs in launched processes before torch does: the agent's and each rank's first function, and a rank's notes.

Imports no torch, so that the launching process can name these functions.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from gradcheck_dist.errors import GradcheckError

_FAREWELL_S = 0.5
_TIMEOUT_MARK = "Timeout ("  # how faulthandler begins its dump, innermost frame first
_CRASH = re.compile(r"^Fatal Python error: .*\n", re.MULTILINE)
_CRASHED_THREAD = re.compile(r"^Current thread .*\n(?:  .*\n?)*", re.MULTILINE)
_THREADS = re.compile(r"^Thread .*\n(?:  .*\n?)+", re.MULTILINE)
_left: list[Any] = []
_LAUNCHER_FRAMES = re.compile(r"( line \d+ in run_rank\n)(?:  File .*\n)+")


@dataclass(frozen=True)
class RankFailure:
    """The rank that the agent saw end badly first; exit_code is negative for a signal."""

    rank: int
    exit_code: int


Outcome = dict[int, bytes] | RankFailure | str
"""What an agent sends back: pickled results by rank, a failure, or why it could not start the ranks."""


def log_path(folder: Path, rank: int, stream: str) -> Path:
    """Where a rank's "stdout" or "stderr" goes."""
    return folder / f"rank_{rank}.{stream}.log"


def error_path(folder: Path, rank: int) -> Path:
    """Where a rank that raised leaves its note; removed before each launch."""
    return folder / f"rank_{rank}.error.json"


def read_errors(folder: Path, nproc: int) -> dict[int, dict[str, Any]]:
    """The notes of the ranks that raised: type, message, code (of a GradcheckError) and time_s (seconds, Unix)."""
    paths = {rank: error_path(folder, rank) for rank in range(nproc)}
    return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def read_log(folder: Path, rank: int) -> str:
    """What the rank wrote to stderr; of a dumped stack only what is the target's own."""
    path = log_path(folder, rank, "stderr")
    text = path.read_text(errors="replace") if path.exists() else ""
    return _LAUNCHER_FRAMES.sub(r"\1", text).strip()


def read_crash(folder: Path, rank: int) -> str:
    """What faulthandler wrote about the signal that ended the rank, with the stack of the thread that got it.

    Of a thread that no Python runs in (gloo's, autograd's) there is no stack: what the main thread did is told.
    "" where there was no such signal.
    """
    text = read_log(folder, rank)
    crash = _CRASH.search(text)
    if crash is None:
        return ""
    if thread := _CRASHED_THREAD.search(text, crash.end()):
        return crash[0] + thread[0]
    others = _THREADS.findall(text, crash.end())  # the main thread comes last
    here = f"; the main thread was here:\n{others[-1]}" if others else ""
    return f"{crash[0]}in a thread that runs no Python{here}"


def timed_out(folder: Path, rank: int) -> bool:
    """Whether the rank ended because its time was up."""
    return _TIMEOUT_MARK in read_log(folder, rank)


def run_agent(sender: Connection, payload: bytes, nproc: int, timeout_s: float, folder: str) -> None:
    """Run the elastic agent in this process and send its `Outcome` to the launching one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        log = os.open(Path(folder) / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except FileNotFoundError:  # interrupted meanwhile: the launching process took its folder away as it left
        return
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        from gradcheck_dist.trainer import elastic

        outcome = elastic.run(run_rank, (payload, folder, timeout_s), nproc, timeout_s, Path(folder))
    except Exception as error:  # of a torch that is not supported, say
        traceback.print_exc()
        outcome = f"{type(error).__name__}: {error}"
    sender.send(outcome)


def run_rank(payload: bytes, folder: str, timeout_s: float, started: Barrier) -> bytes:
    """Run the pickled (target, args, env) on this rank when all have started; returns the pickled result. Called by the
    elastic agent."""
    faulthandler.enable()
    # A rank that hangs cannot be asked to stop; this also writes down where it hung.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    # Ranks mostly wait in C++, where Python's handlers, and those inherited from the agent, are not heard.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held back in the fork server
    threading.Thread(target=_end_with_parent, daemon=True).start()
    started.wait()
    try:
        target, args, env = pickle.loads(payload)
        os.environ.update(env)
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _keep_process_groups()
        module, function = target.split(":")
        result = pickle.dumps(getattr(importlib.import_module(module), function)(*args))
    except BaseException as error:
        _leave_note(error, Path(folder))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    faulthandler.cancel_dump_traceback_later()
    return result


def _keep_process_groups() -> None:
    """Process groups that are left live on until this process ends.

    The last reference to one is often a wrapped model, freed by Python. In launches that hung, a gloo thread that was
    freeing its last work waited for the interpreter lock (torch 2.13: c10d::ProcessGroupGloo::AsyncWork,
    at::ThreadLocalState), while Python was returning from the rank's function. On a loaded machine 9 of 120 launches
    of two DDP ranks hung so, and none of 230 with the groups kept.
    """
    import torch.distributed as dist

    leave = dist.destroy_process_group

    def destroy_process_group(group: Any = None) -> None:
        _left.extend(getattr(dist.distributed_c10d._world, "pg_map", ()))
        leave(group)

    dist.destroy_process_group = destroy_process_group


def _leave_note(error: BaseException, folder: Path) -> None:
    note = {
        "time_s": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "code": error.code if isinstance(error, GradcheckError) else "",
    }
    path = error_path(folder, int(os.environ["RANK"]))
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(note))
    partial.rename(path)
    traceback.print_exc()
    if os.environ["WORLD_SIZE"] != "1":
        # A peer that was killed leaves no note. Staying a little lets the agent see that one first.
        time.sleep(_FAREWELL_S)


def _end_with_parent() -> None:
    """The system takes the fork server for this process's parent, and would let it live on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
