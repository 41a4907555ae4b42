"""A script as one of the ranks that `gradcheck_dist.trainer.launch` forks from a process that has torch loaded."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_script(script: str, arguments: tuple[str, ...], run_dir: str | None, alone: bool) -> None:
    """Run it as `__main__`, with the probes that `gradcheck run` puts in place where a run folder is given.

    `alone`: as a process that no launcher started.
    """
    import torch

    from gradcheck_dist.boot import start
    from gradcheck_dist.boot.protocol import Boot
    from gradcheck_dist.probes import session

    for name in OF_TORCHRUN if alone else ():
        os.environ.pop(name, None)
    if run_dir is not None:
        start.attach(torch, Boot(run_dir))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    if session._session is not None:  # a forked process ends without the hooks of one that was started
        session._session.detach()
