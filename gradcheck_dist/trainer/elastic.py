"""The one place that talks to torch's elastic launcher; runs in the agent process."""

import logging
import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gradcheck_dist.trainer.launch import PRELOAD
from gradcheck_dist.trainer.worker import Outcome, RankFailure, error_path, log_path

_MONITOR_INTERVAL_S = 0.02
_SHUTDOWN_TIMEOUT_S = 3


class _RankLogs(LogsSpecs):
    """One file per rank and stream, straight in the folder (torch's default nests run, attempt and rank)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), redirects=Std.ALL)
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest(
            stdouts={rank: str(log_path(self._folder, rank, "stdout")) for rank in envs},
            stderrs={rank: str(log_path(self._folder, rank, "stderr")) for rank in envs},
            error_files={rank: str(error_path(self._folder, rank)) for rank in envs},
        )


def free_port() -> int:
    """A TCP port that was free a moment ago; another process may take it before us, then `launch` tries again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_method() -> str:
    """Ranks are forked from the agent, which has torch imported and no work begun; CUDA does not survive a fork."""
    if not torch.cuda.is_available():
        return "fork"
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    return "forkserver"


def run(function: Callable[..., Any], args: tuple[Any, ...], nproc: int, timeout_s: float, folder: Path) -> Outcome:
    """Run `function(*args, started)` on `nproc` ranks of this machine; when one fails, stop the others and say which.

    Each waits for the barrier `started` before it does anything that another thread of this process takes part in: what
    that thread holds at a fork stays held in the forked rank. Ranks hung in `init_process_group`, since the thread that
    serves the store was looking up the address of the rank before (glibc's lock on resolv.conf): in 3 of 441 launches
    of four ranks on a loaded machine.
    """
    method = start_method()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid4().hex,
        # torchrun's default. The c10d back end could choose the port itself, but waits up to 0.3 s, at random, first.
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{free_port()}",
        rdzv_configs={"rank": 0, "timeout": max(1, int(timeout_s))},
        max_restarts=0,
        monitor_interval=_MONITOR_INTERVAL_S,
        start_method=method,
        local_addr="127.0.0.1",
        logs_specs=_RankLogs(folder),
        shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
    )
    try:
        started = multiprocessing.get_context(method).Barrier(nproc)
        results: dict[int, bytes] = elastic_launch(config, function)(*args, started)
        return results
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return RankFailure(first.local_rank, first.exitcode)
    except SignalException as error:
        return f"stopped by {error.sigval.name}"
    except (OSError, RuntimeError) as error:
        logging.getLogger(__name__).exception("the ranks could not be started")
        return str(error)
