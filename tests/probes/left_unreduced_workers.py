"""Four ranks of FSDP2, or of HSDP, that reduce the last pass of a step in the next step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, record_each
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VARIANTS = ("in one step", "in bfloat16, in one step", "in every step", "over replicas, in one step",
            "over replicas, in every step", "in one step, not recorded",
            "over replicas, in one step, not recorded")  # fmt: skip
STEPS, PASSES, LATE = 3, 3, 1


def run(folder: str) -> None:
    record_each(folder, VARIANTS, train, steps_of=lambda variant: [LATE + 1] if "not recorded" in variant else None)


def train(variant: str) -> None:
    torch.manual_seed(0)
    replicated = "replicas" in variant
    net = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if replicated else init_device_mesh("cpu", (4,))
    computes_in = torch.bfloat16 if "bfloat16" in variant else None
    fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    reduces = net.set_requires_all_reduce if replicated else net.set_requires_gradient_sync
    for step in range(STEPS):
        batches = [batch(dist.get_rank(), step + k) for k in range(PASSES)]
        count = sum((labels >= 0).sum() for _, labels in batches)
        dist.all_reduce(count)
        late = "every" in variant or step == LATE
        for k, (tokens, labels) in enumerate(batches):
            reduces((k == PASSES - 1) != late)
            loss = F.cross_entropy(net(tokens).flatten(0, 1).float(), labels.flatten(), reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
