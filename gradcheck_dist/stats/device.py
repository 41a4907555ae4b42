"""Statistics of gradients by the Triton kernel: one table to the device, one launch, one copy back.

Importing this module needs triton.
"""

from __future__ import annotations

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


class _Layout:
    """What of the table depends on sizes and types only, and is the same in every step."""

    def __init__(self, sizes: tuple[int, ...], types: tuple[int, ...], counts: tuple[int, ...]) -> None:
        chunks = np.array([-(-size // kernels.CHUNK) for size in sizes], dtype=np.int64)
        self.num_chunks = int(chunks.sum())
        self.starts = np.cumsum(chunks) - chunks
        self.tensor = np.repeat(np.arange(len(sizes)), chunks)
        inside = np.arange(self.num_chunks) - self.starts[self.tensor]
        itemsize = np.array([4, 2, 2])[np.array(types, dtype=np.int64)[self.tensor]]
        self.offset = inside * kernels.CHUNK * itemsize
        gathers = np.array([-(-count // kernels.GATHER) for count in counts], dtype=np.int64)
        self.gathered = np.repeat(np.arange(len(sizes)), gathers)
        part = np.arange(len(self.gathered)) - (np.cumsum(gathers) - gathers)[self.gathered]
        self.position_offset = part * kernels.GATHER * 8
        self.num_samples = sum(counts)
        self.table = np.zeros((self.num_chunks + len(self.gathered), kernels.TABLE_FIELDS), dtype=np.int64)
        first = np.cumsum(counts) - counts if counts else np.empty(0)
        rest = np.concatenate(
            [
                np.minimum(np.array(sizes, dtype=np.int64)[self.tensor] - inside * kernels.CHUNK, kernels.CHUNK),
                np.minimum(np.array(counts, dtype=np.int64)[self.gathered] - part * kernels.GATHER, kernels.GATHER),
            ]
        )
        self.table[:, 2] = rest
        self.table[:, 3] = np.array(types, dtype=np.int64)[np.concatenate([self.tensor, self.gathered])]
        self.table[self.num_chunks :, 4] = first[self.gathered] + part * kernels.GATHER

    def filled(self, own: np.ndarray, other: np.ndarray | None, where: np.ndarray) -> np.ndarray:
        """The table with this step's addresses in it."""
        table = self.table.copy()
        table[: self.num_chunks, 0] = own[self.tensor] + self.offset
        if other is not None:
            table[: self.num_chunks, 1] = other[self.tensor] + self.offset
        table[self.num_chunks :, 0] = own[self.gathered]
        table[self.num_chunks :, 1] = where[self.gathered] + self.position_offset
        return table


class DeviceStats:
    """Starts the kernel; keeps the layouts of the lists it has seen."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[tuple[int, ...], ...], _Layout] = {}

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
        key = (tuple(tensor.numel() for tensor in own), tuple(TYPES[tensor.dtype] for tensor in own), counts)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = _Layout(*key)
        return self._launch(layout, own, other, found, counts)

    def _launch(
        self,
        layout: _Layout,
        own: list[Tensor],
        other: list[Tensor] | None,
        found: list[Tensor | None],
        counts: tuple[int, ...],
    ) -> Pending:
        where = [None if position is None else position.contiguous() for position in found]
        addresses = _addresses(own)
        for index in np.flatnonzero(addresses == 0):
            if own[index].numel():  # an address that nobody may read would end the user's process
                raise ValueError(f"tensor {index} has {own[index].numel()} elements and no memory: it was freed")
        other_addresses = None if other is None else _addresses(other)
        aligned = not (addresses % 16).any() and (other_addresses is None or not (other_addresses % 16).any())
        device = own[0].device
        table = torch.from_numpy(layout.filled(addresses, other_addresses, _addresses(where)))
        if device.type == "cuda":
            table = table.pin_memory().to(device, non_blocking=True)
        partials = torch.empty((layout.num_chunks, kernels.NUM_PARTIALS), dtype=torch.float64, device=device)
        samples = torch.empty(layout.num_samples, dtype=torch.float32, device=device)
        if len(table):
            with torch.cuda.device(device if device.type == "cuda" else -1):
                kernels.stats_kernel[(len(table),)](
                    table,
                    partials,
                    samples,
                    layout.num_chunks,
                    aligned=aligned,
                    with_dot=other is not None,
                    block_size=kernels.BLOCK,
                    gather_size=kernels.GATHER,
                    num_warps=kernels.NUM_WARPS,
                )

        def finish(on_host: list[Tensor]) -> GradientStats:
            return _combine(layout, on_host[0].numpy(), on_host[1].numpy(), len(own), counts, other is not None)

        return Pending(finish, [partials, samples], keep=(table, own, other, where))

    def __call__(
        self,
        tensors: Sequence[Tensor],
        *,
        references: Sequence[Tensor] | None = None,
        positions: Sequence[Tensor | None] | None = None,
    ) -> GradientStats:
        """The statistics, waiting for them."""
        return self.start(tensors, references=references, positions=positions).result()


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


def _addresses(tensors: Sequence[Tensor | None]) -> np.ndarray:
    return np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], dtype=np.int64)


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
