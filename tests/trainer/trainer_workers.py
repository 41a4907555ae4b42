"""What ranks run in these tests."""

import contextlib
import os
import re
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from gradcheck_dist.trainer.config import TrainConfig

Gradients = dict[str, np.ndarray]


def whole_parameters(model: Any) -> contextlib.AbstractContextManager[None]:
    """FSDP1 shows whole parameters and gradients inside of this only."""
    if not hasattr(model, "clip_grad_norm_"):
        return contextlib.nullcontext()
    return type(model).summon_full_params(model, with_grads=True)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers and several stages on a rank put before it."""
    return re.sub(r"^\d+\.|_fsdp_wrapped_module\.|module\.|_checkpoint_wrapped_module\.", "", name)


def several(configs: list[TrainConfig]) -> list[tuple[Gradients, Any] | str]:
    """`step_gradients` of several jobs on the same ranks and in one process group, or what went wrong.

    Most of a short job is what torch does once a process.
    """
    import torch.distributed as dist

    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    outcomes: list[tuple[Gradients, Any] | str] = []
    for config in configs:
        try:
            outcomes.append(step_gradients(config))
        except Exception:
            outcomes.append(traceback.format_exc())
    if dist.is_initialized():
        dist.barrier()
        destroy()
    return outcomes


def step_gradients(config: TrainConfig) -> tuple[Gradients, Any]:
    """Whole gradients, by name, as the optimizer of this rank finds them in the first step; and the result."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from gradcheck_dist.trainer import clip, loop

    seen: list[Gradients] = []
    models: list[Any] = []
    update = loop.Trainer.update

    def remember_model(trainer: loop.Trainer) -> float:
        models.append(trainer.model)
        return update(trainer)

    def look(*_: Any) -> None:
        with whole_parameters(models[0]):
            named = models[0].named_parameters()
            grads = {plain_name(name): clip.whole_gradient(one) for name, one in named if one.grad is not None}
            keep(grads)

    def keep(grads: dict[str, Any]) -> None:
        whole = {
            name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            for name, grad in grads.items()
            if grad is not None
        }
        seen.append({name: grad.detach().float().numpy().copy() for name, grad in whole.items()})

    loop.Trainer.update = remember_model  # type: ignore[method-assign]
    handle = register_optimizer_step_pre_hook(look)
    try:
        return_value = loop.train(config)
    finally:
        handle.remove()
        loop.Trainer.update = update  # type: ignore[method-assign]
    return seen[0], return_value


def leave_pid(folder: str) -> int:
    rank = int(os.environ["RANK"])
    path = Path(folder) / f"pid_{rank}"
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    return rank


def began() -> tuple[float, float]:
    """When this rank was forked, to 0.01 s, and when its target began; seconds since the machine was started."""
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK"), now_s


def lose_rank_one(folder: str, how: str) -> None:
    """All ranks reduce for ever, but rank 1 ends after the first time, or while the others wait for one another."""
    import torch
    import torch.distributed as dist

    rank = leave_pid(folder)
    dist.init_process_group("gloo")
    tensor = torch.ones(3)
    while True:
        dist.all_reduce(tensor)
        if how == "kill while the others wait" and rank != 1:
            dist.recv(tensor, src=2 - rank)
        if rank == 1:
            if how == "raise":
                raise ValueError("no more of this")
            if how.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(7)


def sleep(folder: str, duration_s: float) -> None:
    leave_pid(folder)
    time.sleep(duration_s)


def refuse() -> None:
    from gradcheck_dist.errors import GradcheckError

    raise GradcheckError("not like this", code="E999")


def crash(where: str) -> None:
    """As libraries do: in a call from Python, or in a thread of their own."""
    import ctypes

    libc = ctypes.CDLL(None)
    if where == "call":
        os.kill(os.getpid(), signal.SIGSEGV)
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.abort, None)
    time.sleep(60)


def cpu_time_s() -> float:
    """Seconds of CPU that this process has cost before its target began."""
    return time.process_time()


def echo(value: object) -> tuple[object, int, int, str | None]:
    import torch

    return value, int(os.environ["RANK"]), torch.get_num_threads(), os.environ.get("GRADCHECK_TEST")


def leave_group() -> bool:
    """Whether the group that this rank has left is still there."""
    import weakref

    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = weakref.ref(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    return group() is not None and not dist.is_initialized()


def read_by_attaching(folder: str) -> list[str]:
    """The modules of the package that a rank reads as it attaches, and the functions that it marks for Dynamo."""
    import sys

    from gradcheck_dist.probes import attach
    from gradcheck_dist.probes.recording import dynamo

    before, marked = set(sys.modules), len(dynamo._marked)
    with attach(folder):
        marks = len(dynamo._marked) - marked
    return [*sorted(name for name in set(sys.modules) - before if name.startswith("gradcheck_dist")), *["mark"] * marks]
