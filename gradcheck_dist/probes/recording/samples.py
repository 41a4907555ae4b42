"""Taking samples of gradients, and bringing them and other device values to the host without making anyone wait."""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.events import LEAF
from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.probes.parameters.registry import Layout, LocalPlan, ParamInfo, Registry
from gradcheck_dist.stats import memory

MAX_REMEMBERED = 64
"""Sets of parameters that were sampled together (a mixture of experts reaches others each time)."""


NOTHING = torch.empty(0, device="cpu")
"""Goes the way of copies where only the order counts."""


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

    def bring_together(self, values: Sequence[Tensor], arrived: Callable[[Tensor], None]) -> None:
        """The same of tensors of one shape and type that may lie on several devices: they arrive as one, stacked."""
        places: dict[torch.device, list[int]] = {}
        for index, value in enumerate(values):
            places.setdefault(value.device, []).append(index)
        if len(places) == 1:
            self.bring(torch.stack(tuple(values)), arrived)
            return
        whole = torch.empty((len(values), *values[0].shape), dtype=values[0].dtype, device="cpu")

        def came(of_device: list[int], is_last: bool, host: Tensor) -> None:
            whole[of_device] = host
            if is_last:
                arrived(whole)

        for number, of_device in enumerate(places.values(), 1):
            mine = torch.stack([values[index] for index in of_device])
            self.bring(mine, functools.partial(came, of_device, number == len(places)))

    def expect(self, pending: Any, arrived: Callable[[], None]) -> None:
        """Call arrived() when `pending` (with query() and synchronize()) is done; in order with the copies."""
        if pending.query() and not self._waiting:
            arrived()
        else:
            self._waiting.append((pending, NOTHING, lambda _: arrived()))

    def start(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Begin a copy: (event or None when it is there already, host tensor)."""
        if tensor.device.type == "cpu":
            return None, tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda")
        host.copy_(tensor, non_blocking=True)
        module = torch.get_device_module(tensor.device)
        event, current_stream = module.Event(), getattr(module, "current_stream", None)
        event.record(*(() if current_stream is None else (current_stream(tensor.device),)))
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


class SideStreams:
    """CUDA streams on which values were computed that another stream will read: FSDP2 reduces on one of its own, and
    the event that training waits for lies in front of what a probe computes there afterwards."""

    def __init__(self) -> None:
        self._noted: set[torch.cuda.Stream] = set()

    def note(self, value: Tensor) -> None:
        """A value was computed on the stream that is current."""
        if value.is_cuda:
            self._noted.add(torch.cuda.current_stream(value.device))

    def join(self, values: Sequence[Tensor]) -> None:
        """Let the current stream wait for the noted ones, and nobody use the values' memory before it has read them."""
        for stream in self._noted:
            reading = torch.cuda.current_stream(stream.device)
            if reading != stream:
                reading.wait_stream(stream)
                for value in values:
                    if value.device == stream.device:
                        value.record_stream(reading)

    def clear(self) -> None:
        self._noted.clear()


class Bundle:
    """Parameters whose gradients are sampled together, each a whole tensor of one type on the CPU.

    Their values are gathered into memory that is allocated once: an allocation a parameter, and laying the results end
    to end, would cost more than reading them. `rows` has shape (n, 4): seq and role, to be filled in, parameter id,
    plan id; row i's values are the bytes from bounds[i] to bounds[i + 1] of `values`. `norm_rows` has shape (n, 3):
    parameter id, plan id, number of elements that are not finite, to be filled in. `sizes` are the parameters' numbers
    of elements, `counts` how many of `indices`, flat positions end to end, belong to each.
    """

    __slots__ = ("bounds", "counts", "dtype", "indices", "norm_rows", "params", "parts", "rows", "sizes", "values")

    def __init__(self, infos: list[ParamInfo], dtype: torch.dtype) -> None:
        plans = [info.plain for info in infos if info.plain is not None]
        counts = [len(plan.indices) for plan in plans]
        gathered = torch.empty(sum(counts), dtype=dtype, device="cpu")
        params = [info.param for info in infos]
        self.dtype = dtype
        self.params = params
        self.sizes = [param.numel() for param in params]
        self.counts: np.ndarray = np.array(counts)
        self.indices: np.ndarray = np.concatenate([np.from_dlpack(plan.indices) for plan in plans])
        self.parts = list(zip(params, [plan.indices for plan in plans], gathered.split(counts), strict=True))
        self.rows = row_table(plans)
        self.norm_rows: np.ndarray = np.array([(plan.param_id, plan.id, 0) for plan in plans], dtype="<i4")
        self.values: memoryview = gathered.view(torch.uint8).numpy().data
        self.bounds: list[int] = (np.cumsum([0, *counts]) * gathered.element_size()).tolist()

    def without(self, missing: list[int]) -> tuple[np.ndarray, bytes]:
        """Rows and values of all but some parameters."""
        left = sorted(set(range(len(self.parts))) - set(missing))
        pieces = [self.values[self.bounds[index] : self.bounds[index + 1]] for index in left]
        return self.rows[left], b"".join(pieces)


class Seen(NamedTuple):
    """Gradients of parameters, each a plain float32 tensor, and where they begin in memory: to be used at once."""

    infos: list[ParamInfo]
    bundle: Bundle
    grads: list[Tensor]
    found: list[int]


class Arrivals:
    """Leaves of one type that arrive in one order, pass after pass: their slots are laid end to end, so that the values
    of all of them are copied at once. `rows` is that of a Bundle."""

    __slots__ = ("rows", "slots", "values")

    def __init__(self, plans: list[LocalPlan], dtype: torch.dtype) -> None:
        counts = [len(plan.indices) for plan in plans]
        slots = torch.empty(sum(counts), dtype=dtype, device="cpu")
        self.rows = row_table(plans)
        self.slots = slots.split(counts)
        self.values: memoryview = slots.view(torch.uint8).numpy().data
        for plan, slot in zip(plans, self.slots, strict=True):
            plan.slot = slot

    def lie_together(self, plans: list[LocalPlan]) -> bool:
        """Whether no other order has taken one of the slots away since."""
        return all(map(is_, [plan.slot for plan in plans], self.slots))


def row_table(plans: Sequence[LocalPlan]) -> np.ndarray:
    """int32 of shape (n, 4): seq and role, to be filled in, parameter id, plan id."""
    return np.array([(0, 0, plan.param_id, plan.id) for plan in plans], dtype="i4")


class Sampler:
    """Keeps sampled elements of gradients, apart by type and device, until they are written: FSDP's gradients may go to
    the host, and one process may train on several accelerators."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.streams = SideStreams()
        self.sampling = True  # False: events are recorded and no samples are taken
        # A row and its values come with one append: a thread that reduces beside a backward pass puts none in between.
        self._kept: list[tuple[tuple[int, int, int, int], Tensor]] = []
        self._on_host: list[tuple[torch.dtype, bytes, bytes]] = []  # rows and values
        self._bundles: dict[tuple[int, ...], Bundle | None] = {}  # None: not together
        self._arrivals: dict[tuple[int, ...], Arrivals] = {}

    def sample(self, seq: int, role: int, info: ParamInfo, tensor: Tensor, layout: Layout | None = None) -> bool:
        """Keep the sampled elements of a gradient, on its device. False: its layout in the parameter is not known.

        `layout`: how a plain `tensor` lies in it, where it is neither all of it nor a DTensor.
        """
        if not (self.sampling and info.active):
            return True
        registry = self.registry
        found = registry.plan(info, tensor) if layout is None else registry.local_plan(info, tensor, layout)
        if found is None:
            return False
        plan, local = found
        values = elements(local.detach(), plan.indices)
        if values is not None:
            self.keep(seq, role, plan, values)
        return values is not None

    def sample_if(self, seq: int, role: int, info: ParamInfo, holds: Tensor) -> None:
        """Keep the sampled elements of `.grad`, or zeros where `holds`, a 0-d boolean on its device, is not true."""
        grad = info.param.grad
        asked = grad is not None and self.sampling and info.active and not info.regions
        found = self.registry.plan(info, grad) if asked and grad is not None else None
        if found is not None and (values := elements(found[1].detach(), found[0].indices)) is not None:
            self.keep(seq, role, found[0], torch.where(holds, values, torch.zeros_like(values)))

    def sample_grads(self, seq: int, role: int, infos: list[ParamInfo]) -> Seen | None:
        """Sample `.grad` of parameters that have one. Where they lie, for who reads more of them at once."""
        if self.registry.rotates:
            infos = [info for info in infos if info.active]
        if not self.sampling:
            return None
        if len(infos) > 1 and (bundle := self.bundle(infos)) is not None:
            seen = self._sample_at_once(bundle, seq, role, infos)
            if seen is not None or self._sample_together(bundle, seq, role, infos):
                return seen
        for info in infos:
            grad = info.param.grad
            if grad is None:
                continue
            if info.regions and grad.layout is torch.strided:
                self.sample_regions(seq, role, info.regions, getattr(grad, "_local_tensor", grad))
            elif not info.regions:
                self.sample(seq, role, info, grad)
        return None

    def bundle(self, infos: list[ParamInfo]) -> Bundle | None:
        """What is kept ready for sampling these parameters together; None when they cannot be."""
        asked = tuple([info.id for info in infos])
        bundle = self._bundles.get(asked)
        if bundle is None and asked not in self._bundles:
            if not all(info.plain is not None and not info.regions for info in infos):
                return None  # the slow way finds their plans
            dtype = next((info.param.grad.dtype for info in infos if info.param.grad is not None), None)
            if dtype is None:
                return None
            if len(self._bundles) >= MAX_REMEMBERED:
                self._bundles.clear()
            bundle = self._bundles[asked] = Bundle(infos, dtype)
        return bundle

    def _sample_at_once(self, bundle: Bundle, seq: int, role: int, infos: list[ParamInfo]) -> Seen | None:
        """What `sample_grads` does, where each parameter has a plain float32 gradient on the CPU; else nothing."""
        if bundle.dtype is not torch.float32:
            return None
        grads: Any = [param.grad for param in bundle.params]
        found = memory.addresses(grads, bundle.sizes)
        if found is None:
            return None
        values = memory.gather(found, bundle.counts, bundle.indices).tobytes()
        bundle.rows[:, 0], bundle.rows[:, 1] = seq, role
        self._keep_bytes(bundle.dtype, bundle.rows.tobytes(), values)
        return Seen(infos, bundle, grads, found)

    def _sample_together(self, bundle: Bundle, seq: int, role: int, infos: list[ParamInfo]) -> bool:
        """The same, where gradients are plain ones on the CPU and of one type; else False, and nothing is done."""
        missing: list[int] = []
        take = torch.take
        try:
            for index, (param, indices, slot) in enumerate(bundle.parts):
                grad = param.grad
                if type(grad) is Tensor:
                    take(grad, indices, out=slot)
                elif grad is None:
                    missing.append(index)
                else:
                    return False
        except RuntimeError:  # another device, type or layout, or one that is differentiated again
            self._bundles[tuple([info.id for info in infos])] = None
            return False
        if not missing:
            rows, values = bundle.rows, bundle.values.tobytes()
        elif len(missing) == len(bundle.parts):
            return True
        else:
            rows, values = bundle.without(missing)
        rows[:, 0], rows[:, 1] = seq, role
        self._keep_bytes(bundle.dtype, rows.tobytes(), values)
        return True

    def _keep_bytes(self, dtype: torch.dtype, rows: bytes, values: bytes) -> None:
        self._on_host.append((dtype, rows, values))

    def sample_regions(self, seq: int, role: int, regions: Iterable[Region], tensor: Tensor) -> None:
        """Sample the parts of a tensor that are gradients of parameters or of parts of them."""
        for region in regions if self.sampling else ():
            if not region.info.active:
                continue
            plan = self.registry.region_plan(region, tensor.device)  # of which no element may be sampled: that is told
            self.keep(seq, role, plan, tensor.detach().take(plan.indices))

    def sample_parts(self, seq: int, role: int, info: ParamInfo, regions: list[Region], buffer: Tensor) -> None:
        """Sample a parameter's gradient, of which `regions` lie in `buffer`."""
        if hasattr(info.param.grad, "_local_tensor"):
            self.sample_grads(seq, role, [info])  # the DTensor knows which part of the parameter lies here
        else:
            self.sample_regions(seq, role, regions, buffer)

    def keep_leaves(self, seq: int, leaves: list[LocalPlan]) -> None:
        """Keep what a backward pass sampled at its leaves, which lies in their plans' slots; empties the list."""
        for dtype in {plan.slot.dtype for plan in leaves}:
            self._keep_arrived(seq, dtype, [plan for plan in leaves if plan.slot.dtype is dtype])
        leaves.clear()

    def _keep_arrived(self, seq: int, dtype: torch.dtype, plans: list[LocalPlan]) -> None:
        asked = tuple([plan.id for plan in plans])
        known = self._arrivals.get(asked)
        if known is not None and known.lie_together(plans):
            values = known.values.tobytes()
        else:
            values = b"".join([plan.slot.view(torch.uint8).numpy() for plan in plans])
            if known is None:
                if len(self._arrivals) >= MAX_REMEMBERED:
                    self._arrivals.clear()
                known = self._arrivals[asked] = Arrivals(plans, dtype)
        rows = known.rows
        rows[:, 0], rows[:, 1] = seq, LEAF
        self._keep_bytes(dtype, rows.tobytes(), values)

    def keep(self, seq: int, role: int, plan: LocalPlan, values: Tensor) -> None:
        """Keep one row. Of complex numbers the real part: weights are real, so it tells them as well."""
        if values.is_complex():
            values = values.real
        self._kept.append(((seq, role, plan.param_id, plan.id), values))
        self.streams.note(values)

    def drain_host(self) -> list[tuple[str, bytes, bytes]]:
        """(type, rows, values end to end) of all that was gathered on the host."""
        kept, self._on_host = self._on_host, []
        by_type: dict[torch.dtype, tuple[list[bytes], list[bytes]]] = {}
        for dtype, rows, values in kept:
            of_rows, of_values = by_type.setdefault(dtype, ([], []))
            of_rows.append(rows)
            of_values.append(values)
        return [(_name(dtype), b"".join(rows), b"".join(values)) for dtype, (rows, values) in by_type.items()]

    def drain(self) -> list[tuple[str, bytes, Tensor]]:
        """(type, rows, values end to end as bytes on their device) of all else that waits."""
        kept, self._kept = self._kept, []
        self.streams.join([values for _, values in kept])
        by_kind: dict[tuple[torch.dtype, torch.device], tuple[array[int], list[Tensor]]] = {}
        for row, values in kept:
            rows, of_kind = by_kind.setdefault((values.dtype, values.device), (array("i"), []))
            rows.extend(row)
            of_kind.append(values)
        return [
            (_name(dtype), rows.tobytes(), torch.cat(of_kind).view(torch.uint8))
            for (dtype, _), (rows, of_kind) in by_kind.items()
        ]


def elements(tensor: Tensor, indices: Tensor) -> Tensor | None:
    """Elements of a tensor at flat positions; None of a layout that is not read. Rows that a sparse gradient (an
    embedding's) does not hold are zero."""
    if tensor.layout is torch.strided:
        return tensor.take(indices)
    if tensor.layout is not torch.sparse_coo or tensor.sparse_dim() != 1:
        return None
    whole = tensor.coalesce()
    rows, values = whole.indices()[0], whole.values().reshape(whole.values().shape[0], -1)
    if not len(rows):
        return torch.zeros(len(indices), dtype=tensor.dtype, device=tensor.device)
    wanted, column = indices // values.shape[1], indices % values.shape[1]
    place = torch.searchsorted(rows, wanted).clamp(max=len(rows) - 1)
    return torch.where(rows[place] == wanted, values[place, column], values.new_zeros(()))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
