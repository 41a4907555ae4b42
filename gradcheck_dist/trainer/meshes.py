"""Device meshes: the same ranks, seen along the axes that dense layers, experts and sequences are split over."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradcheck_dist.trainer.config import TrainConfig


@dataclass(frozen=True)
class Meshes:
    """Views of all ranks. Axes of size 1 are left out, but for what shards: "fsdp" and "expert_fsdp".

    Attributes:
        dense: pp, dp_replicate, fsdp (dp_shard * cp) and tp.
        context: the same with dp_shard and cp apart; None with cp = 1.
        expert: the same with fsdp divided into expert_fsdp and ep; None with ep = 1.
    """

    dense: DeviceMesh
    context: DeviceMesh | None
    expert: DeviceMesh | None

    def submesh(self, axis: str) -> DeviceMesh | None:
        """The mesh along one axis; None when it is not in use."""
        for mesh in (self.dense, self.context, self.expert):
            if mesh is not None and axis in (mesh.mesh_dim_names or ()):
                return mesh[axis]
        return None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group along one axis; None when it is not in use."""
        mesh = self.submesh(axis)
        return mesh.get_group() if mesh is not None else None

    def experts(self) -> DeviceMesh | None:
        """What experts are spread and split over: ep, and tp inside of it where there is one; None with ep = 1."""
        names = self.expert.mesh_dim_names or () if self.expert is not None else ()
        if self.expert is None or "ep" not in names:
            return None
        return self.expert["ep", "tp"] if "tp" in names else self.expert["ep"]

    def data_parallel(self, *, experts: bool = False) -> DeviceMesh | None:
        """What FSDP2 shards over, inside of replicas where there are some; None when nothing is sharded."""
        mesh, shard = (self.expert, "expert_fsdp") if experts else (self.dense, "fsdp")
        names = [name for name in ("dp_replicate", shard) if mesh is not None and name in (mesh.mesh_dim_names or ())]
        if mesh is None or not names:
            return None
        return mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]


def build_meshes(config: TrainConfig, device: torch.device) -> Meshes | None:
    """The meshes of the axes that are in use; None for a single process. A collective call."""
    axes = config.axes
    if axes.world_size == 1:
        return None
    dense = {
        "pp": axes.pp,
        "dp_replicate": axes.dp_replicate,
        "fsdp": axes.dp_shard * axes.cp,
        "tp": axes.tp,
    }
    context = {
        "pp": axes.pp,
        "dp_replicate": axes.dp_replicate,
        "dp_shard": axes.dp_shard,
        "cp": axes.cp,
        "tp": axes.tp,
    }
    expert = {
        "pp": axes.pp,
        "dp_replicate": axes.dp_replicate,
        "expert_fsdp": axes.dp_shard * axes.cp // axes.ep,
        "ep": axes.ep,
        "tp": axes.tp,
    }
    if axes.cp == axes.ep == 1:
        return Meshes(_mesh(device, dense), None, None)
    world = init_device_mesh(device.type, (axes.world_size,), mesh_dim_names=("world",))
    return Meshes(
        _view(world, dense),
        _view(world, context) if axes.cp > 1 else None,
        _view(world, expert, keep="expert_fsdp") if axes.ep > 1 else None,
    )


def _mesh(device: torch.device, sizes: dict[str, int]) -> DeviceMesh:
    shape, names = _used(sizes)
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def _used(sizes: dict[str, int], keep: str = "") -> tuple[tuple[int, ...], tuple[str, ...]]:
    names = tuple(name for name, size in sizes.items() if size > 1 or name == keep)
    return tuple(sizes[name] for name in names), names


def _view(world: DeviceMesh, sizes: dict[str, int], keep: str = "") -> DeviceMesh:
    shape, names = _used(sizes, keep)
    assert math.prod(shape) == world.size()
    return world._unflatten(0, shape, names)  # one root for all views, so that FSDP2 may combine them
