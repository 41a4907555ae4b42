"""The tests of CPU trainers with their tensors on one GPU: GRADCHECK_TEST_DEVICE=cuda (make test-gpu).

Whatever names no device is made there, and ranks share the card over nccl, each of which is told to be a host of its
own (NCCL refuses two ranks on one device of one host; its `NCCL_HOSTID`). What tests lay on the CPU by name stays
there, so some fail by themselves: "expected all tensors to be on the same device".
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE = os.environ.get("GRADCHECK_TEST_DEVICE", "")
OF_NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2"}


class OnDevice(TorchFunctionMode):
    """torch.set_default_device that gets along with generators of the CPU and with `.numpy()`."""

    def __init__(self) -> None:
        super().__init__()
        self._makes = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.numpy:
            return func(args[0].cpu(), *args[1:], **given)
        if func not in self._makes or given.get("device") is not None:
            return func(*args, **given)
        generator = given.get("generator")
        if generator is None or generator.device.type == DEVICE:
            return func(*args, **given | {"device": DEVICE})
        asked = given.pop("requires_grad", False)
        return func(*args, **given).to(DEVICE).requires_grad_(asked)


# Lines of the tests are looked for below torch's own frames, and this stands between them.
_there = OnDevice.__torch_function__
_there.__code__ = _there.__code__.replace(co_filename=torch.utils._device.__file__)


def through(launch: Callable[..., list[Any]], runner: str = "on_cuda:run") -> Callable[..., list[Any]]:
    """`launch`, of ranks that do what they are to do by way of `runner`: on the device."""

    @functools.wraps(launch)
    def launch_there(target: str, args: tuple[Any, ...], nproc: int, **options: Any) -> list[Any]:
        return launch(runner, (target, args), nproc, **options)

    return launch_there


def run(target: str, args: tuple[Any, ...]) -> Any:
    """What a rank was to do, on the device."""
    from gradcheck_dist.trainer import loop

    if DEVICE == "cuda":
        os.environ.update(OF_NCCL, NCCL_HOSTID=f"rank-{os.environ['RANK']}")
        torch.cuda.set_device(0)
        torch.zeros(1, device=DEVICE)  # else a mesh sets the device of the local rank
    start, mesh = dist.init_process_group, dist.device_mesh.init_device_mesh
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group = lambda _=None, *rest, **given: start(backend, *rest, **given)
    dist.init_device_mesh = dist.device_mesh.init_device_mesh = lambda _, *rest, **given: mesh(DEVICE, *rest, **given)
    loop.pick_device = lambda config: torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)
    module, function = target.split(":")
    with OnDevice():
        return getattr(importlib.import_module(module), function)(*args)
