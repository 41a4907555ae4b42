"""Where else a parameter lies: in flat buffers, in float32 copies that an optimizer owns, in shards of such copies.

An optimizer need not own the model's parameters. Mixed precision keeps float32 copies (apex's FP16_Optimizer,
Megatron's Float16OptimizerWithFloat16Params), ZeRO and Megatron's distributed optimizer keep a rank's part of many
parameters as one flat tensor or as slices. A copy is known by where it lies in memory, or by its values when the
optimizer is first seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradcheck_dist.probes.parameters.registry import ParamInfo

NUM_COMPARED = 64
"""Elements that must agree where a copy is taken to be one."""

MAX_SCANNED = 2**27
"""Elements read in all while copies are searched for: about 0.2 s. What was not found by then stays unknown."""

MAX_CANDIDATES = 64


class Region(NamedTuple):
    """`length` elements of a parameter, from `start` on, lie in another tensor from `offset` on (both flattened)."""

    info: ParamInfo
    start: int
    offset: int
    length: int

    def part(self, low: int, high: int) -> Region | None:
        """What of it lies in [low, high) of the other tensor, counted from `low` on."""
        first, last = max(self.offset, low), min(self.offset + self.length, high)
        if first >= last:
            return None
        return Region(self.info, self.start + first - self.offset, first - low, last - first)

    def holds(self, other: Region) -> bool:
        """Whether the other one's elements are of this one's."""
        return self.info is other.info and self.start <= other.start < self.start + self.length


def buffer_of(info: ParamInfo) -> Tensor | None:
    """The tensor of the parameter's size that hangs on it in place of `.grad`."""
    for name, kept in vars(info.param).items():
        if "grad" in name and isinstance(kept, Tensor) and kept.shape == info.param.shape:
            return kept
    return None


def main_grad_of(info: ParamInfo) -> Tensor | None:
    """Where Megatron's wrappers, and those in their manner, gather a parameter's gradient while `.grad` is empty."""
    kept = vars(info.param).get("main_grad")
    return kept if isinstance(kept, Tensor) and kept.shape == info.param.shape and not info.regions else None


def gradient_of(info: ParamInfo) -> Tensor | None:
    """Where a parameter's gradient lies now, on this rank."""
    grad = info.param.grad
    return buffer_of(info) if grad is None else getattr(grad, "_local_tensor", grad)


def in_memory(tensor: Tensor, held: Iterable[tuple[Sequence[Region], Tensor]]) -> list[Region]:
    """What of `tensor` is known: overlaps with tensors whose regions are known, by address.

    Only contiguous tensors of one type are compared, and others (channels last) with what has their shape and strides.
    """
    if tensor.layout is not torch.strided or not tensor.data_ptr():
        return []
    if not tensor.is_contiguous():
        return [region for regions, other in held if _same_place(tensor, other) for region in regions]
    size, begin = tensor.element_size(), tensor.data_ptr()
    end = begin + tensor.numel() * size
    found = []
    for regions, other in held:
        if other.layout is not torch.strided:
            continue
        start = other.data_ptr()
        if start >= end or start + other.numel() * size <= begin or other.dtype != tensor.dtype:
            continue
        if (start - begin) % size or not other.is_contiguous():
            continue
        shift = (start - begin) // size
        for region in regions:
            moved = Region(region.info, region.start, region.offset + shift, region.length)
            part = moved.part(0, tensor.numel())
            if part is not None:
                found.append(part)
    return found


def _same_place(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    if other.layout is not torch.strided or other.dtype != tensor.dtype or other.data_ptr() != tensor.data_ptr():
        return False
    return other.shape == tensor.shape and other.stride() == tensor.stride()


class Finder:
    """Finds of which parameters the tensors of an optimizer are copies, by address or by value."""

    def __init__(self) -> None:
        self._scanned = 0
        self._copied: set[int] = set()
        self._told: list[tuple[list[Region], int]] = []  # of copies whose values tell: what is in them, and their size

    def find(
        self,
        copies: Sequence[Tensor],
        infos: Sequence[ParamInfo],
        gradients: Iterable[tuple[Sequence[Region], Tensor]] = (),
        parts: Iterable[tuple[Sequence[Region], Tensor]] = (),
    ) -> dict[int, list[Region]]:
        """The regions of each of an optimizer's tensors, by its place; those that are no copies are left out. `parts`:
        tensors that are known to hold parts of parameters (FSDP1's shards, and its views of them).

        Reads values on the host, once for each copy, when an optimizer is first seen. Values that are all alike (a
        norm's ones) prove nothing: they count beside a copy that was found by others, and where their gradient is part
        of one of the parameters' `gradients`, that tells whose copies they are.
        """
        # One that is whole only while it is used (ZeRO-3 by hand) may hold nothing now.
        plain = [
            info
            for info in infos
            if not hasattr(info.param, "_local_tensor") and not info.param.is_meta and info.param.numel()
        ]
        local = {index: getattr(copy, "_local_tensor", copy) for index, copy in enumerate(copies)}
        flat = {index: held.detach().reshape(-1) for index, held in local.items() if not held.is_meta and held.numel()}
        found: dict[int, list[Region]] = {}
        parts = list(parts)
        alone = [(regions[0], tensor) for regions, tensor in parts if len(regions) == 1]
        known, sources = list(gradients), _Sources([*map(_held_whole, plain), *_shards(infos), *alone])
        for varied in (True, False):
            for index, values in flat.items():
                if index in found or _varied(values) != varied or not (varied or found):
                    continue
                regions = (
                    (not varied and _by_gradient(copies[index], values, known))
                    or self._of(values, plain, sources)
                    or _of_flat(values, parts)
                )
                if regions:
                    found[index] = regions
        self._told += [(regions, flat[index].numel()) for index, regions in found.items() if _varied(flat[index])]
        found |= self._between(flat, found, plain)
        return found | self._left_over(flat, found, plain)

    def _between(
        self, flat: dict[int, Tensor], found: dict[int, list[Region]], infos: Sequence[ParamInfo]
    ) -> dict[int, list[Region]]:
        """Copies whose values are all alike, by their place: between copies of two parameters stand as many as between
        these in the model, and each is the same part of its parameter (ZeRO by parameters, as ColossalAI shards)."""
        place = {info.id: index for index, info in enumerate(infos)}
        alone = [(index, regions[0]) for index, regions in sorted(found.items()) if len(regions) == 1]
        known = [(index, region) for index, region in alone if region.info.id in place]
        more: dict[int, list[Region]] = {}
        for (low, first), (high, last) in pairwise(known):
            copies = [index for index in range(low + 1, high) if index in flat and index not in found]
            between = infos[place[first.info.id] + 1 : place[last.info.id]]
            if not len(copies) == len(between) == high - low - 1 or _part_of(first) != _part_of(last):
                continue
            begin, share = _part_of(first)
            for index, info in zip(copies, between, strict=True):
                region = Region(info, round(begin * info.numel), 0, flat[index].numel())
                exact = _part_of(region) == (begin, share) and not _varied(info.param) and not _varied(flat[index])
                if exact and _same(info.param, flat[index], -region.start):
                    more[index] = [region]
        return more

    def _left_over(
        self, flat: dict[int, Tensor], found: dict[int, list[Region]], infos: Sequence[ParamInfo]
    ) -> dict[int, list[Region]]:
        """The one tensor that is left, where constants (norms' ones, biases' zeros) are all that no other one holds: a
        group of an optimizer's without weight decay, of which ZeRO keeps the same part as of the groups before it."""
        left = [index for index in flat if index not in found]
        if len(left) != 1 or not self._told:
            return {}
        held_by = [*found.values(), *(regions for regions, _ in self._told)]
        claimed = self._copied | {region.info.id for regions in held_by for region in regions}
        constants = {info.id: info for info in infos if info.id not in claimed and not _varied(info.param)}
        total, values = sum(info.numel for info in constants.values()), flat[left[0]]
        self._scanned += total
        parts = _part_numbers(self._told, [info for info in infos if info.id not in constants])
        if self._scanned > MAX_SCANNED or len(parts) != 1 or (part := parts.pop()) is None:
            return {}
        number, count = part
        if -(-total // values.numel()) != count:
            return {}
        offset, held = -number * values.numel(), []
        for info in constants.values():
            mine = Region(info, 0, offset, info.numel).part(0, values.numel())
            held += [mine] if mine is not None else []
            offset += info.numel
        if not held:
            return {}
        wanted = [info.param.detach().reshape(-1)[start : start + length] for info, start, _, length in held]
        expected = torch.cat(wanted).to(values.device)
        same = torch.equal(values[: len(expected)].to(expected.dtype), expected)
        return {left[0]: held} if same and not values[len(expected) :].any() else {}

    def _of(self, flat: Tensor, infos: list[ParamInfo], sources: _Sources) -> list[Region]:
        found = in_memory(flat, [([region], held) for region, held in sources.beside(flat)])
        if not found:
            twins = sources.twins(flat)
            twins.sort(key=lambda region: region.info.id in self._copied)  # first those without a copy, as in the model
            found = twins[:1]
        found = found or self._tile(flat, infos)
        self._copied.update(region.info.id for region in found if sources.has(region))
        return found

    def _tile(self, flat: Tensor, infos: list[ParamInfo]) -> list[Region]:
        """Parameters, or the ends of some, one after the other in a flat tensor, in the model's order or against it.

        What its values show is placed first; what could lie in several places (a norm's ones, a bias's zeros) is put
        beside its neighbour in the model.
        """
        placed: dict[int, Region] = {}
        for index, info in enumerate(infos):
            if not _varied(info.param) or info.id in self._copied:
                continue
            near = [shift for shift in _beside(infos, index, placed, 0) if _same(info.param, flat, shift)]
            shifts = near or self._shifts(info, flat)
            if len(shifts) == 1:
                placed[index] = _region(info, shifts[0], flat.numel())
        order = sorted(placed)
        direction = 1 if not order or placed[order[0]].offset <= placed[order[-1]].offset else -1
        rest = [index for index, info in enumerate(infos) if index not in placed and not _varied(info.param)]
        for index in [*rest, *rest[::-1]]:  # along the model, and back: each beside the one that was just placed
            if index in placed:
                continue
            for shift in _beside(infos, index, placed, direction):
                if _same(infos[index].param, flat, shift):
                    region = _region(infos[index], shift, flat.numel())
                    if not any(_overlap(region, other) for other in placed.values()):
                        placed[index] = region
                        break
        return [placed[index] for index in sorted(placed)]

    def _shifts(self, info: ParamInfo, flat: Tensor) -> list[int]:
        """Where in `flat` a parameter could begin; negative where its beginning lies before it."""
        values = info.param.detach().reshape(-1)
        self._scanned += flat.numel() + values.numel()
        if self._scanned > MAX_SCANNED:
            return []
        first, first_flat = values[:1], flat[:1].to(values.dtype)
        inside = torch.nonzero(flat.to(values.dtype) == first).reshape(-1)[:MAX_CANDIDATES].tolist()
        before = torch.nonzero(values[1:] == first_flat).reshape(-1)[:MAX_CANDIDATES].tolist()
        shifts = [*inside, *(-1 - index for index in before)]
        return [shift for shift in shifts if _same(info.param, flat, shift)]


class _Sources:
    """What of parameters lies on this rank, by where it lies and by what it holds, so that each copy is not compared
    with all of them."""

    def __init__(self, held: Iterable[tuple[Region, Tensor]]) -> None:
        self._of_storage: dict[int, list[tuple[Region, Tensor]]] = defaultdict(list)
        self._of_values: dict[tuple[int, torch.dtype, bytes], list[Region]] = defaultdict(list)
        self._dtypes: dict[int, set[torch.dtype]] = defaultdict(set)
        self._lengths: dict[int, int] = {}
        for region, tensor in held:
            dtype = tensor.dtype
            self._of_storage[_storage(tensor)].append((region, tensor))
            self._dtypes[region.length].add(dtype)
            self._of_values[region.length, dtype, _compared(tensor.reshape(-1), dtype)].append(region)
            self._lengths[region.info.id] = region.length

    def beside(self, flat: Tensor) -> list[tuple[Region, Tensor]]:
        """What was allocated together with a tensor."""
        return self._of_storage.get(_storage(flat), [])

    def twins(self, flat: Tensor) -> list[Region]:
        """What has a tensor's size and agrees with it, in its own type, as `_same` says."""
        size = flat.numel()
        keys = [(size, dtype, _compared(flat, dtype)) for dtype in self._dtypes.get(size, ())]
        found = [region for key in keys for region in self._of_values.get(key, ())]
        return sorted(found, key=lambda region: region.info.id)

    def has(self, region: Region) -> bool:
        """Whether a region is all that this rank has of its parameter."""
        return region.length == self._lengths.get(region.info.id)


def _held_whole(info: ParamInfo) -> tuple[Region, Tensor]:
    return whole(info), info.param.detach()


def _shards(infos: Iterable[ParamInfo]) -> Iterator[tuple[Region, Tensor]]:
    """This rank's parts of DTensors, where these are rows of them that lie one after the other."""
    parted = [info for info in infos if hasattr(info.param, "_local_tensor") and info.shape]
    if not parted:
        return
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for info in parted:
        param: Any = info.param
        local = param._local_tensor
        if local.is_meta or not local.numel() or param.device_mesh.get_coordinate() is None:
            continue
        if not all(type(one) is Replicate or one == Shard(0) for one in param.placements):
            continue
        shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        if tuple(shape) == tuple(local.shape):
            start = offset[0] * (info.numel // info.shape[0])
            yield Region(info, start, 0, local.numel()), local.detach()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compared(flat: Tensor, dtype: torch.dtype) -> bytes:
    values = flat[spread(flat.numel(), flat.device)].to(dtype)
    return values.cpu().view(torch.uint8).numpy().tobytes()


def spread(length: int, device: torch.device) -> Tensor:
    """Positions of elements that are compared, over all of a tensor."""
    return torch.linspace(0, length - 1, min(length, NUM_COMPARED), dtype=torch.float64, device=device).long()


def _by_gradient(copy: Tensor, values: Tensor, gradients: Iterable[tuple[Sequence[Region], Tensor]]) -> list[Region]:
    """Of what a tensor is a copy, told by where its gradient lies, and by nothing of its values that says otherwise."""
    grad = copy.grad
    if grad is None or grad.is_meta:
        return []
    found = in_memory(grad.detach(), gradients)
    if sum(region.length for region in found) != values.numel():
        return []
    for info, start, offset, length in found:
        mine = info.param.detach().reshape(-1)[start : start + length].to(values.dtype)
        if not torch.equal(mine[:NUM_COMPARED], values[offset : offset + length][:NUM_COMPARED]):
            return []
    return found


def _of_flat(values: Tensor, parts: Iterable[tuple[Sequence[Region], Tensor]]) -> list[Region]:
    """What is in a tensor that agrees with one in which parts of several parameters lie."""
    for regions, tensor in parts:
        if len(regions) > 1 and tensor.numel() == values.numel():
            flat = tensor.reshape(-1)
            if _compared(flat, flat.dtype) == _compared(values, flat.dtype):
                return list(regions)
    return []


def _part_of(region: Region) -> tuple[Fraction, Fraction]:
    """Where a region begins in its parameter and how much of it it is."""
    size = region.info.numel
    return Fraction(region.start, size), Fraction(region.length, size)


def _part_numbers(
    copies: Iterable[tuple[Sequence[Region], int]], infos: Sequence[ParamInfo]
) -> set[tuple[int, int] | None]:
    """Which of how many equal parts of some parameters, one after the other, copies of these sizes are; None for one
    that is none of them."""
    sizes = [info.numel for info in infos]
    begins = dict(zip((info.id for info in infos), accumulate(sizes, initial=0), strict=False))
    found: set[tuple[int, int] | None] = set()
    for (first, *_), length in copies:
        begin = begins.get(first.info.id, -1) + first.start - first.offset
        found.add(None if begin < 0 or begin % length else (begin // length, -(-sum(sizes) // length)))
    return found


def part_size(info: ParamInfo, num_ranks: int) -> int:
    """Elements of each rank's part of a parameter, filled up to be equal."""
    return -(-info.numel // num_ranks)


def whole(info: ParamInfo) -> Region:
    """All of a parameter, in a tensor of its own size."""
    return Region(info, 0, 0, info.numel)


def _region(info: ParamInfo, shift: int, size: int) -> Region:
    start, offset = max(-shift, 0), max(shift, 0)
    return Region(info, start, offset, min(info.numel - start, size - offset))


def _overlap(one: Region, other: Region) -> bool:
    return one.offset < other.offset + other.length and other.offset < one.offset + one.length


def _beside(infos: list[ParamInfo], index: int, placed: dict[int, Region], direction: int) -> list[int]:
    """Where a parameter would begin, were it the neighbour of one that is placed: in the model's order (1), against it
    (-1), or either (0)."""
    shifts = []
    for neighbour, side in ((index - 1, 1), (index + 1, -1)):
        region = placed.get(neighbour)
        if region is None:
            continue
        begin = region.offset - region.start
        if direction in (0, side):
            shifts.append(begin + region.info.numel)
        if direction in (0, -side):
            shifts.append(begin - infos[index].numel)
    return list(dict.fromkeys(shifts))


def _same(param: Tensor, flat: Tensor, shift: int) -> bool:
    """Whether sampled values of a parameter agree with those of a flat tensor in which it would begin at `shift`."""
    start, offset = max(-shift, 0), max(shift, 0)
    length = min(param.numel() - start, flat.numel() - offset)
    if length <= 0:
        return False
    index = spread(length, flat.device)
    mine = param.detach().reshape(-1)[start : start + length][index]
    return bool(torch.equal(mine, flat[offset : offset + length][index].to(mine.dtype)))


def _varied(param: Tensor) -> bool:
    """Whether a parameter's values tell it from others: not all ones or zeros."""
    head = param.detach().reshape(-1)[:NUM_COMPARED]
    return bool((head != head[:1]).any())
