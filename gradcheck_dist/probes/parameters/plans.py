"""Parameters as the probes know them, and which elements of which tensor are sampled for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import UNNAMED, AnyRecord, Plan
from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.stats.sampling import positions_in_box, sample_positions


class LocalPlan:
    """Which elements of a local tensor are sampled: flat indices on its device.

    `slot` is where those of a leaf's gradient on the CPU lie from its arrival to the end of the pass.
    """

    __slots__ = ("id", "indices", "param_id", "slot")

    def __init__(self, id: int, param_id: int, indices: Any, device: torch.device) -> None:
        self.id = id
        self.param_id = param_id
        self.indices = torch.as_tensor(indices, dtype=torch.int64, device=device)
        self.slot: Any = None

    def new_slot(self, dtype: torch.dtype) -> Tensor:
        self.slot = slot = torch.empty(len(self.indices), dtype=dtype, device="cpu")
        return slot


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a plain tensor, of shape `held`, lies in one of `shape` that ranks share as DTensors do."""

    shape: tuple[int, ...]
    device_mesh: Any
    placements: tuple[Any, ...]
    held: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        """That of a DTensor's local part."""
        return cls(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements), tuple(tensor._local_tensor.shape))


class ParamInfo:
    """A parameter as the probes know it. `plans` caches a plan per layout, `plain` the one of a whole CPU tensor.

    `active` tells whether it is sampled in this step: of a large model's parameters one in `period` is. `regions` is
    not empty where an optimizer's tensor is no parameter of the model but a copy of parts of some. `arrives_as` is how
    a plain gradient that arrives in backward lies in it, where that is no matter of course. `shape` and `numel` are
    those of the whole parameter, also while `param` holds nothing (ZeRO 3). `reduced_in` is the last recorded step in
    which a reduction of its gradient over several ranks was seen.
    """

    __slots__ = (
        "active",
        "arrives_as",
        "id",
        "managed_by",
        "name",
        "numel",
        "param",
        "period",
        "plain",
        "plans",
        "positions",
        "reduced_in",
        "regions",
        "shape",
        "stage",
        "wrapper",
    )

    @property
    def named(self) -> bool:
        """Whether a module has shown it."""
        return not self.name.startswith(UNNAMED)

    def __init__(self, id: int, name: str, param: Tensor, stage: int | None, sample_size: int) -> None:
        self.id = id
        self.name = name
        self.stage = stage
        self.shows(param, sample_size)
        self.plans: dict[Any, LocalPlan] = {}
        self.plain: LocalPlan | None = None
        self.managed_by: str | None = None
        self.wrapper: int | None = None
        self.arrives_as: Layout | None = None
        self.regions: tuple[Region, ...] = ()
        self.period = 1
        self.active = True
        self.reduced_in = -1

    def shows(self, param: Tensor, sample_size: int) -> None:
        """Stand for a tensor, or for the one that it turned out to be a part of."""
        self.param = param
        self.shape = tuple(param.shape)
        self.numel = param.numel()
        self.positions = sample_positions(str(self.shape), self.numel, sample_size)


def summed_over(tensor: Any) -> tuple[int, ...]:
    """The ranks whose local parts of a DTensor are summands of one tensor; none where they are no summands."""
    dims = [dim for dim, placement in enumerate(tensor.placements) if placement.is_partial()]
    if not dims:
        return ()
    place = tensor.device_mesh.get_coordinate()
    index = tuple(slice(None) if dim in dims else one for dim, one in enumerate(place))
    return tuple(tensor.device_mesh.mesh[index].flatten().tolist())


def averaged_over(tensor: Any) -> int:
    """By how many the sum of a DTensor's summands is divided: the ranks along dimensions of Partial("avg")."""
    averaged = [
        dim for dim, one in enumerate(tensor.placements) if one.is_partial() and getattr(one, "reduce_op", "") == "avg"
    ]
    return prod(tensor.device_mesh.size(dim) for dim in averaged)


class Plans:
    """Makes each plan once; a new one goes out through `write`."""

    def __init__(self, write: Callable[[AnyRecord], None]) -> None:
        self._write = write
        self._plan_ids = count()  # threads that reduce at once each take another

    def plan(self, info: ParamInfo, tensor: Tensor) -> tuple[LocalPlan, Tensor] | None:
        """How to sample `tensor`, the gradient of a parameter, and its local part.

        None when the tensor's layout in the parameter is not known (its size is neither the parameter's nor a
        DTensor's).
        """
        if tensor.numel() != info.numel:
            return None
        if info.plain is not None and type(tensor) is Tensor and tensor.is_cpu:
            return info.plain, tensor
        local = getattr(tensor, "_local_tensor", None)
        if local is None:
            key: Any = tensor.device
            found = info.plans.get(key)
            if found is None:
                found = info.plans[key] = self._new_plan(
                    info, None, info.positions, tensor.device, (), (0,) * len(info.shape), info.shape
                )
                if type(tensor) is Tensor and tensor.is_cpu and not tensor.is_complex() and info.arrives_as is None:
                    info.plain = found
            return found, tensor
        key = (tensor.placements, id(tensor.device_mesh))  # type: ignore[attr-defined]
        found = info.plans.get(key)
        if found is None:
            if tuple(tensor.shape) != info.shape:
                return None
            found = info.plans[key] = self._dtensor_plan(info, tensor, local)
        return found, local

    def local_plan(self, info: ParamInfo, local: Tensor, layout: Layout) -> tuple[LocalPlan, Tensor] | None:
        """How to sample a plain tensor that lies in the parameter as `layout` says."""
        if layout.shape != info.shape or tuple(local.shape) != layout.held:
            return None
        key = ("local", layout.placements, id(layout.device_mesh))
        found = info.plans.get(key)
        if found is None:
            found = info.plans[key] = self._dtensor_plan(info, layout, local)
        return found, local

    def region_plan(self, region: Region, device: torch.device) -> LocalPlan:
        """How to sample a parameter's part of another tensor."""
        info, start, offset, length = region
        key = ("region", start, offset, length, device)
        found = info.plans.get(key)
        if found is None:
            which = ((info.positions >= start) & (info.positions < start + length)).nonzero()[0]
            indices = info.positions[which] - start + offset
            chosen = None if len(which) == len(info.positions) else which
            whole = length == info.numel
            box = ((0,) * len(info.shape), info.shape) if whole else ((start,), (length,))
            found = info.plans[key] = self._new_plan(info, chosen, indices, device, (), *box)
        return found

    def _dtensor_plan(self, info: ParamInfo, tensor: Layout | Any, local: Tensor) -> LocalPlan:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        which, indices = positions_in_box(info.positions, info.shape, tuple(shape), tuple(offset))
        chosen = None if len(which) == len(info.positions) else which
        known = tuple(shape) == tuple(local.shape)
        box = (tuple(offset), tuple(shape)) if known else (None, None)
        partial, mean = summed_over(tensor), averaged_over(tensor)
        return self._new_plan(info, chosen, indices, local.device, partial, box[0], box[1], mean)

    def _new_plan(
        self,
        info: ParamInfo,
        which: Any,
        indices: Any,
        device: torch.device,
        partial: tuple[int, ...],
        offset: tuple[int, ...] | None,
        extent: tuple[int, ...] | None,
        mean: int = 1,
    ) -> LocalPlan:
        plan = LocalPlan(next(self._plan_ids), info.id, indices, device)
        positions = None if which is None else which.astype("<i4").tobytes()
        self._write(
            Plan(
                id=plan.id,
                param=info.id,
                num_values=len(indices),
                positions=positions,
                partial=bool(partial),
                partial_over=partial,
                partial_mean=mean,
                offset=offset,
                extent=extent,
            )
        )
        return plan
