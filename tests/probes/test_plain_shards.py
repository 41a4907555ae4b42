"""Parameters that FSDP shares among ranks, and of which modules see a plain part (spmd_types, torch 2.15)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradcheck_dist.events import AnyRecord, Plan
from gradcheck_dist.probes.parameters.registry import Registry
from gradcheck_dist.probes.reductions import fsdp

RANK = 3


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dist.destroy_process_group()


def shared(mesh: DeviceMesh, held: tuple[int, ...], lies: Placement, grad: Placement) -> SimpleNamespace:
    """What torch keeps of a parameter of shape (8, 4), or of the part of it that ranks hold."""
    spec = SimpleNamespace(shape=torch.Size((8, 4)), mesh=mesh, placements=(Replicate(), lies))
    return SimpleNamespace(
        is_spmd_types=True,
        _orig_size=torch.Size(held),
        _dp_dim_indices=frozenset({0}),
        _unsharded_dtensor_spec=spec,
        _spmd_grad_placements=(Partial(), grad),
    )


def plans(of_param: SimpleNamespace) -> tuple[Plan, Plan]:
    """Of a gradient as it arrives in backward, and as FSDP reduces it."""
    written: list[AnyRecord] = []
    registry = Registry(written.append, 32)
    info = registry.add_unnamed(nn.Parameter(torch.zeros(8, 4)))
    fsdp.lies_in(info, of_param)
    before = fsdp.before_reduction(of_param)
    grad = torch.zeros(of_param._orig_size)
    made = []
    for layout in (info.arrives_as, before):
        assert layout is not None
        found = registry.local_plan(info, grad, layout)
        assert found is not None
        made.append(next(one for one in written if isinstance(one, Plan) and one.id == found[0].id))
    return made[0], made[1]


def test_a_shard_is_the_ranks_part_all_the_way(mesh: DeviceMesh) -> None:
    found = plans(shared(mesh, (4, 4), Shard(0), Shard(0)))
    assert [(plan.offset, plan.extent, plan.partial_over) for plan in found] == [((4, 0), (4, 4), ())] * 2


def test_a_copy_gets_a_summand_that_is_summed_before_fsdp_reduces_it(mesh: DeviceMesh) -> None:
    found = plans(shared(mesh, (8, 4), Replicate(), Partial()))
    assert [(plan.extent, plan.partial_over) for plan in found] == [((8, 4), (2, 3)), ((8, 4), ())]
