"""Parameters that are whole only while they are used (ZeRO 3), and hold nothing between, or this rank's part.

A rank keeps an equal part of each, and the optimizer owns these parts one after the other in flat tensors of its own
(as DeepSpeed partitions), or in the parameters themselves.
When a gradient arrives, its parameter is whole: a few values of what could be this rank's part are kept then, and tell
when the optimizer reads where that part lies.

Source: `partition_numel` and `_aligned_size` in deepspeed/runtime/zero/partition_parameters.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gradcheck_dist.probes.parameters.regions import MAX_CANDIDATES, MAX_SCANNED, Region, part_size, spread

if TYPE_CHECKING:
    from gradcheck_dist.probes.parameters.registry import ParamInfo

Share = tuple[int, int]
"""(which part, of how many)"""

LEAST_SCANS = 2
"""So often a tensor is searched from end to end, however large it is."""


class _Part(NamedTuple):
    """What could be this rank's part of a parameter: `values` are those at the elements `which` of it."""

    share: Share
    start: int
    length: int
    which: Tensor
    values: Tensor


class _Kept(NamedTuple):
    """`varied`: whether its values differ, shape (); where they do not, `parts` prove nothing."""

    info: ParamInfo
    varied: Tensor
    parts: list[_Part]


class InUse:
    """Remembers what parameters held while they were whole."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._share: Share | None = None  # that of all parameters, once it is known of one
        self._scans_left = 0
        self._told: set[int] = set()

    def keep(self, info: ParamInfo) -> None:
        """A parameter is whole now."""
        values = info.param.detach().reshape(-1)
        parts = [_part(values, share) for share in _shares()]
        self._kept[info.id] = _Kept(info, (values != values[:1]).any(), [part for part in parts if part.length])

    def in_parts(self) -> list[Tensor]:
        """Parameters that are not known as parts yet, and hold one now; each is told once."""
        new = [kept.info for key, kept in self._kept.items() if key not in self._told]
        found = [info for info in new if info.param.numel() not in (0, info.numel)]
        self._told.update(info.id for info in found)
        return [info.param for info in found]

    def find(self, flat: Tensor, only: ParamInfo | None = None) -> list[Region]:
        """Which parts of parameters lie in an optimizer's tensor; [] where that is not known. `only`: of this one.

        Reads values on the host, once for each parameter and tensor.
        """
        if not self._kept or flat.is_meta or hasattr(flat, "_local_tensor"):
            return []
        values = flat.detach().reshape(-1)
        placed: dict[int, Region] = {}
        self._scans_left = max(LEAST_SCANS, MAX_SCANNED // max(1, len(values)))
        asked = {key: kept for key, kept in sorted(self._kept.items()) if only in (None, kept.info)}
        for kept in asked.values():
            if kept.varied and (region := self._place(kept, values, placed)) is not None:
                placed[kept.info.id] = region
        for region in self._between(values, placed, asked):
            placed[region.info.id] = region
        for key in placed:
            del self._kept[key]
        return [placed[key] for key in sorted(placed, key=lambda key: placed[key].offset)]

    def _place(self, kept: _Kept, values: Tensor, placed: dict[int, Region]) -> Region | None:
        """Where a parameter's part lies: behind the one that was placed last, or wherever its values stand. What all
        ranks share out is asked for first."""
        parts = [part for part in kept.parts if self._share in (None, part.share) and part.length <= len(values)]
        last = next(reversed(placed.values()), None)
        for part in sorted(parts, key=lambda part: -part.share[1]):
            offset = next((one for one in self._offsets(part, values, last) if _holds(values, part, one)), None)
            if offset is not None:
                begin = offset - part.start  # a part of many ranks lies in one of fewer
                there = [one for one in parts if _holds(values, one, begin + one.start)]
                part = max(there, key=lambda one: one.length)
                self._share = part.share
                return Region(kept.info, part.start, begin + part.start, part.length)
        return None

    def _offsets(self, part: _Part, values: Tensor, last: Region | None) -> Iterator[int]:
        """Where a part may begin. All values are searched where it does not stand behind the one placed last."""
        if last is not None:
            yield last.offset + part_size(last.info, part.share[1])
        self._scans_left -= 1
        if self._scans_left < 0:
            return
        anchor = int(part.values.abs().argmax())  # many an embedding's first row is zero
        value = part.values[anchor].to(values.device)
        found = torch.nonzero(values.to(value.dtype) == value).reshape(-1)[:MAX_CANDIDATES].tolist()
        yield from (place - int(part.which[anchor]) for place in found)

    def _between(self, values: Tensor, placed: dict[int, Region], asked: dict[int, _Kept]) -> Iterable[Region]:
        """Parts of parameters whose values are all alike (a norm's ones), where those that stand between two others in
        the model fill what is between these in the tensor."""
        share = self._share
        if share is None:
            return
        ends = sorted(placed)
        for low, high in zip([None, *ends], [*ends, None], strict=True):
            begin = 0 if low is None else placed[low].offset + part_size(placed[low].info, share[1])
            end = values.numel() if high is None else placed[high].offset
            left = [
                kept
                for key, kept in asked.items()
                if not kept.varied and (low is None or key > low) and (high is None or key < high)
            ]
            if sum(part_size(kept.info, share[1]) for kept in left) != end - begin:
                continue
            regions = []
            for kept in left:
                part = next((part for part in kept.parts if part.share == share), None)
                if part is not None and _holds(values, part, begin):
                    regions.append(Region(kept.info, part.start, begin, part.length))
                elif part is not None:
                    break
                begin += part_size(kept.info, share[1])
            else:
                yield from regions


def _shares() -> list[Share]:
    """Which part of how many this rank could hold: of all, or of the ranks of a group that it is in."""
    if not dist.is_initialized():
        return [(0, 1)]
    rank = dist.get_rank()
    groups = [list(ranks) for ranks in distributed_c10d._world.pg_group_ranks.values()]
    found = {(sorted(ranks).index(rank), len(ranks)) for ranks in groups if rank in ranks}
    return sorted({(0, 1), *found})


def _part(values: Tensor, share: Share) -> _Part:
    size = -(-values.numel() // share[1])
    start = min(share[0] * size, values.numel())
    own = values[start : start + size]
    which = spread(len(own), own.device)
    return _Part(share, start, len(own), which.cpu(), own[which])


def _holds(values: Tensor, part: _Part, offset: int) -> bool:
    if offset < 0 or offset + part.length > values.numel():
        return False
    theirs = values[part.which.to(values.device) + offset].to(part.values.dtype)
    return bool(torch.equal(theirs, part.values.to(theirs.device)))
