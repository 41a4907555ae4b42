"""Taking samples of gradients, and bringing them and other device values to the host without making anyone wait."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.events import LEAF
from gradcheck_dist.probes.regions import Region
from gradcheck_dist.probes.registry import LocalPlan, ParamInfo, Registry

STRIDED = torch.strided


class HostCopies:
    """Copies of device tensors on their way to the host.

    A CPU tensor arrives at once. One on an accelerator is copied on its own stream's time into pinned memory, and is
    handed on when an event says that it is there: at the next poll, never by waiting inside training.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Any, Tensor, Callable[[Tensor], None]]] = deque()

    def bring(self, tensor: Tensor, arrived: Callable[[Tensor], None]) -> None:
        """Call arrived(host tensor) when the copy is there; copies arrive in the order in which they were asked for."""
        event, host = self.start(tensor)
        if event is None and not self._waiting:
            arrived(host)
        else:
            self._waiting.append((event, host, arrived))

    def expect(self, pending: Any, arrived: Callable[[], None]) -> None:
        """Call arrived() when `pending` (with query() and synchronize()) is done; in order with the copies."""
        if pending.query() and not self._waiting:
            arrived()
        else:
            self._waiting.append((pending, torch.empty(0), lambda _: arrived()))

    def start(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Begin a copy: (event or None when it is there already, host tensor)."""
        if tensor.device.type == "cpu":
            return None, tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        host.copy_(tensor, non_blocking=True)
        event = torch.get_device_module(tensor.device).Event()
        event.record()
        return event, host

    def poll(self, *, wait: bool = False) -> None:
        """Hand on what has arrived; `wait` for all of it (when recording ends)."""
        while self._waiting:
            event, host, arrived = self._waiting[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
            self._waiting.popleft()
            arrived(host)


class Bundle:
    """Parameters whose gradients are sampled together, each a whole tensor on the CPU. `rows` has shape (n, 4): seq
    and role, to be filled in, parameter id, plan id."""

    __slots__ = ("parts", "rows")

    def __init__(self, infos: list[ParamInfo]) -> None:
        self.parts = [(info.param, info.plain.indices) for info in infos if info.plain is not None]
        self.rows = np.array([(0, 0, info.plain.param_id, info.plain.id) for info in infos if info.plain], dtype="i4")


class Sampler:
    """Keeps sampled elements of gradients, apart by type, until they are written."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.sampling = True  # False: events are recorded and no samples are taken
        self._rows: dict[torch.dtype, array[int]] = {}
        self._values: dict[torch.dtype, list[Tensor]] = {}
        self._bundles: dict[tuple[int, ...], Bundle] = {}

    def sample(self, seq: int, role: int, info: ParamInfo, tensor: Tensor, like: Tensor | None = None) -> bool:
        """Keep the sampled elements of a gradient, on its device. False: its layout in the parameter is not known.

        `like`: a DTensor whose local part `tensor` stands for.
        """
        if not (self.sampling and info.active):
            return True
        registry = self.registry
        found = registry.plan(info, tensor) if like is None else registry.local_plan(info, tensor, like)
        if found is None:
            return False
        plan, local = found
        self._keep(seq, role, plan, local.detach().take(plan.indices))
        return True

    def sample_grads(self, seq: int, role: int, infos: list[ParamInfo]) -> None:
        """Sample `.grad` of parameters that have one."""
        if self.registry.rotates:
            infos = [info for info in infos if info.active]
        if not self.sampling or (len(infos) > 1 and self._sample_together(seq, role, infos)):
            return
        for info in infos:
            grad = info.param.grad
            if grad is None or grad.layout is not torch.strided:
                continue
            if info.regions:
                self.sample_regions(seq, role, info.regions, grad)
            else:
                self.sample(seq, role, info, grad)

    def _sample_together(self, seq: int, role: int, infos: list[ParamInfo]) -> bool:
        """What `sample_grads` does, where all gradients are plain ones on the CPU and of one type; else False, and
        nothing is done. Runs for every parameter of every step: kept short."""
        asked = tuple([info.id for info in infos])
        bundle = self._bundles.get(asked)
        if bundle is None:
            if not all(info.plain is not None and not info.regions for info in infos):
                return False  # the slow way finds their plans
            bundle = self._bundles[asked] = Bundle(infos)
        values: list[Tensor] = []
        missing: list[int] = []
        dtype: torch.dtype | None = None
        for index, (param, indices) in enumerate(bundle.parts):
            grad = param.grad
            if grad is None:
                missing.append(index)
                continue
            dtype = dtype or grad.dtype
            if type(grad) is not Tensor or grad.dtype is not dtype or grad.requires_grad or grad.layout is not STRIDED:
                return False
            if not grad.is_cpu:
                return False
            values.append(grad.take(indices))
        if dtype is not None:
            rows = bundle.rows.copy() if not missing else np.delete(bundle.rows, missing, axis=0)
            rows[:, 0], rows[:, 1] = seq, role
            self._keep_all(dtype, rows.tobytes(), values)
        return True

    def _keep_all(self, dtype: torch.dtype, rows: bytes, values: list[Tensor]) -> None:
        if dtype not in self._rows:
            self._rows[dtype], self._values[dtype] = array("i"), []
        self._rows[dtype].frombytes(rows)
        self._values[dtype] += values

    def sample_regions(self, seq: int, role: int, regions: Iterable[Region], tensor: Tensor) -> None:
        """Sample the parts of a tensor that are gradients of parameters or of parts of them."""
        for region in regions if self.sampling else ():
            if not region.info.active:
                continue
            plan = self.registry.region_plan(region, tensor.device)
            if len(plan.indices):
                self._keep(seq, role, plan, tensor.detach().take(plan.indices))

    def keep_leaves(self, seq: int, leaves: list[tuple[LocalPlan, Tensor]]) -> None:
        """Keep what a backward pass sampled at its leaves, one entry a parameter; empties the list."""
        if not leaves:
            return
        dtype = leaves[0][1].dtype
        if all(values.dtype is dtype for _, values in leaves):
            rows = array("i", [part for plan, _ in leaves for part in (seq, LEAF, plan.param_id, plan.id)])
            self._keep_all(dtype, rows.tobytes(), [values for _, values in leaves])
        else:
            for plan, values in leaves:
                self._keep(seq, LEAF, plan, values)
        leaves.clear()

    def _keep(self, seq: int, role: int, plan: LocalPlan, values: Tensor) -> None:
        dtype = values.dtype
        rows = self._rows.get(dtype)
        if rows is None:
            rows = self._rows[dtype] = array("i")
            self._values[dtype] = []
        rows.extend((seq, role, plan.param_id, plan.id))
        self._values[dtype].append(values)

    def drain(self) -> list[tuple[str, bytes, Tensor]]:
        """(type, rows, values end to end as bytes on their device) of all that waits."""
        rows, values = self._rows, self._values
        self._rows, self._values = {}, {}
        return [
            (str(dtype).removeprefix("torch."), rows[dtype].tobytes(), torch.cat(values[dtype]).view(torch.uint8))
            for dtype in rows
        ]
