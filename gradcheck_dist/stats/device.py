"""Statistics of gradients by the Triton kernel: addresses to the device, one launch, one copy back.

Importing this module needs triton.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.stats import kernels
from gradcheck_dist.stats.inputs import check_companions, is_dense, local_tensors
from gradcheck_dist.stats.pending import Pending
from gradcheck_dist.stats.result import GradientStats

TYPES = {torch.float32: kernels.FLOAT32, torch.bfloat16: kernels.BFLOAT16, torch.float16: kernels.FLOAT16}
"""What the kernel reads."""
NUM_LAYOUTS = 16
"""Lists whose layout is kept, each 40 bytes on the device for 65536 elements: probes read a model in turns."""


class _Layout:
    """What depends on sizes and types only, and is the same in every step: the table, which stays on the device."""

    def __init__(
        self, sizes: tuple[int, ...], types: tuple[int, ...], counts: tuple[int, ...], device: torch.device
    ) -> None:
        chunks = np.array([-(-size // kernels.CHUNK) for size in sizes], dtype=np.int64)
        self.num_chunks = int(chunks.sum())
        self.starts = np.cumsum(chunks) - chunks
        self.tensor = np.repeat(np.arange(len(sizes)), chunks)
        inside = np.arange(self.num_chunks) - self.starts[self.tensor]
        gathers = np.array([-(-count // kernels.GATHER) for count in counts], dtype=np.int64)
        gathered = np.repeat(np.arange(len(sizes)), gathers)
        part = np.arange(len(gathered)) - (np.cumsum(gathers) - gathers)[gathered]
        self.num_samples = sum(counts)
        kinds = np.array(types, dtype=np.int64)
        self.kind = types[0] if len(set(types)) == 1 else kernels.MIXED
        table = np.zeros((self.num_chunks + len(gathered), kernels.TABLE_FIELDS), dtype=np.int64)
        table[:, 0] = np.concatenate([self.tensor, gathered])
        table[:, 3] = kinds[table[:, 0]]
        of_chunks, of_gathers = table[: self.num_chunks], table[self.num_chunks :]
        of_chunks[:, 1] = inside * kernels.CHUNK * np.array([4, 2, 2])[kinds[self.tensor]]
        of_chunks[:, 2] = np.minimum(
            np.array(sizes, dtype=np.int64)[self.tensor] - inside * kernels.CHUNK, kernels.CHUNK
        )
        of_gathers[:, 1] = part * kernels.GATHER * 8
        of_gathers[:, 2] = np.minimum(
            np.array(counts, dtype=np.int64)[gathered] - part * kernels.GATHER, kernels.GATHER
        )
        of_gathers[:, 4] = (np.cumsum(counts) - counts)[gathered] + part * kernels.GATHER
        self.table = _sent(table, device)
        self._on_its_way: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._on_its_way = torch.cuda.Event()
            self._on_its_way.record(torch.cuda.current_stream(device))

    def wait(self, device: torch.device) -> None:
        """Let the current stream go on when the table has come, which another stream may have fetched."""
        if self._on_its_way is not None:
            if self._on_its_way.query():
                self._on_its_way = None
            else:
                torch.cuda.current_stream(device).wait_event(self._on_its_way)


def _sent(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device, without a wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class DeviceStats:
    """Starts the kernel; keeps the layouts of the lists that it has seen last."""

    def __init__(self) -> None:
        self._layout = functools.lru_cache(maxsize=NUM_LAYOUTS)(_Layout)

    def start(
        self,
        tensors: Sequence[Tensor],
        *,
        references: Sequence[Tensor] | None = None,
        positions: Sequence[Tensor | None] | None = None,
    ) -> Pending:
        """Launch on the current stream and return at once; see reference.gradient_stats for the arguments.

        Positions must lie on the tensors' device.

        Raises:
            ValueError: tensors on several devices, or of a type that the kernel does not read.
        """
        tensors = local_tensors(tensors)
        others = None if references is None else local_tensors(references)
        check_companions(tensors, others, positions)
        found: list[Tensor | None] = [None] * len(tensors) if positions is None else list(positions)
        _check(tensors, others, found)
        if not tensors:
            return Pending(lambda _: _empty(others is not None), [])
        ordered = others is not None
        own = [_laid_out(tensor, ordered or where is not None) for tensor, where in zip(tensors, found, strict=True)]
        other = None if others is None else [
            _laid_out(tensor.to(like.dtype), True) for tensor, like in zip(others, own, strict=True)
        ]  # fmt: skip
        counts = tuple(0 if where is None else len(where) for where in found)
        sizes, types = tuple(tensor.numel() for tensor in own), tuple(TYPES[tensor.dtype] for tensor in own)
        return self._launch(self._layout(sizes, types, counts, own[0].device), own, other, found, counts)

    def _launch(
        self,
        layout: _Layout,
        own: list[Tensor],
        other: list[Tensor] | None,
        found: list[Tensor | None],
        counts: tuple[int, ...],
    ) -> Pending:
        where = [None if position is None else position.contiguous() for position in found]
        none: list[Tensor | None] = [None] * len(own)
        lists: tuple[Sequence[Tensor | None], ...] = (own, other or none, where)
        addresses = np.array([[0 if tensor is None else tensor.data_ptr() for tensor in each] for each in lists])
        for index in np.flatnonzero(addresses[0] == 0):
            if own[index].numel():  # an address that nobody may read would end the user's process
                raise ValueError(f"tensor {index} has {own[index].numel()} elements and no memory: it was freed")
        device = own[0].device
        sent = _sent(addresses, device)
        partials = torch.empty((layout.num_chunks, kernels.NUM_PARTIALS), dtype=torch.float64, device=device)
        samples = torch.empty(layout.num_samples, dtype=torch.float32, device=device)
        if len(layout.table):
            layout.wait(device)
            with torch.cuda.device(device if device.type == "cuda" else -1):
                kernels.stats_kernel[(len(layout.table),)](
                    layout.table,
                    sent,
                    partials,
                    samples,
                    layout.num_chunks,
                    len(own),
                    kind=layout.kind,
                    aligned=not (addresses[:2] % 16).any(),
                    with_dot=other is not None,
                    block_size=kernels.BLOCK,
                    gather_size=kernels.GATHER,
                    num_warps=kernels.NUM_THREADS // _warp_size(device),
                )

        def finish(on_host: list[Tensor]) -> GradientStats:
            return _combine(layout, on_host[0].numpy(), on_host[1].numpy(), len(own), counts, other is not None)

        return Pending(finish, [partials, samples], keep=(layout.table, sent, own, other, where))

    def __call__(
        self,
        tensors: Sequence[Tensor],
        *,
        references: Sequence[Tensor] | None = None,
        positions: Sequence[Tensor | None] | None = None,
    ) -> GradientStats:
        """The statistics, waiting for them."""
        return self.start(tensors, references=references, positions=positions).result()


def _warp_size(device: torch.device) -> int:
    """Threads of a warp: 32, or 64 on some cards of AMD's; of triton's interpreter it does not matter."""
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _check(tensors: list[Tensor], others: list[Tensor] | None, positions: list[Tensor | None]) -> None:
    for index, tensor in enumerate([*tensors, *(others or ())]):
        if tensor.dtype not in TYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
            raise ValueError(f"tensor {index} is {tensor.dtype}; the kernel reads {names}")
    devices = {tensor.device for tensor in [*tensors, *(where for where in positions if where is not None)]}
    if len(devices) > 1:
        raise ValueError(
            f"tensors and positions lie on {sorted(map(str, devices))}; give those of one device at a time"
        )


def _laid_out(tensor: Tensor, ordered: bool) -> Tensor:
    """The tensor itself where its memory can be read from one end to the other, else a copy."""
    return tensor if tensor.is_contiguous() or (not ordered and is_dense(tensor)) else tensor.contiguous()


def _empty(with_dot: bool) -> GradientStats:
    none, counts = np.empty(0), np.empty(0, dtype=np.int64)
    return GradientStats(none, none, counts, counts, none if with_dot else None, none, counts)


def _combine(
    layout: _Layout, partials: np.ndarray, samples: np.ndarray, num_tensors: int, counts: tuple[int, ...], dot: bool
) -> GradientStats:
    """Chunks to tensors, in the order of the chunks: the same bits every time."""
    table = np.zeros((num_tensors, kernels.NUM_PARTIALS))
    held = np.unique(layout.tensor)
    if len(held):
        starts = layout.starts[held]
        table[held] = np.add.reduceat(partials, starts, axis=0)
        table[held, 1] = np.maximum.reduceat(partials[:, 1], starts)
    return GradientStats(
        l2=np.sqrt(table[:, 0]),
        abs_max=table[:, 1],
        num_nonfinite=table[:, 2].astype(np.int64),
        num_zero=table[:, 3].astype(np.int64),
        dot=table[:, 4] if dot else None,
        samples=samples.astype(np.float64),
        sample_counts=np.array(counts, dtype=np.int64),
    )
