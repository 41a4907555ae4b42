"""Ranks of an FSDP2 trainer that reduces shards once more by hand, for test_summed_shards.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradcheck_dist.probes import attach


def train(run_dir: str, over_replicas: bool) -> None:
    """The gradient of a norm's weight is summed over the ranks that hold its shards; or, over replicas, averaged over
    those that hold the same one, where the wrapper reduces none."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    world = dist.get_world_size()
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 11))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    with attach(run_dir):
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        group = mesh.get_group("replicate" if over_replicas else "shard")
        for _ in range(2):
            inputs, labels = torch.randn(6, 64, generator=generator), torch.randint(11, (6,), generator=generator)
            F.cross_entropy(model(inputs), labels).backward()
            for param in model.parameters() if over_replicas else (model[1].weight,):
                shard = param.grad.to_local()
                dist.all_reduce(shard, group=group)
                if over_replicas:
                    shard /= 2
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
