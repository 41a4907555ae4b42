"""Two ranks of FSDP2 whose options are set in the midst of training, or to unusual numbers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, record_each
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VARIANTS = ("unsharded by hand", "unsharded by hand, loss not multiplied", "one module out of sync", "divided by four",
            "divided by four, loss multiplied by four", "divided by four in a step", "halved by a hook")  # fmt: skip
STEPS, PASSES = 2, 3


def run(folder: str) -> None:
    record_each(folder, VARIANTS, train)


def train(variant: str) -> None:
    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    sharded = [fully_shard(net.inner, mesh=mesh), fully_shard(net, mesh=mesh)]
    for param in net.parameters() if variant == "halved by a hook" else ():
        param.register_post_accumulate_grad_hook(lambda param: param.grad.div_(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    times = 1 if "not multiplied" in variant else 4 if "multiplied by four" in variant else 2
    for step in range(STEPS):
        for module in sharded if "divided by" in variant and step >= ("in a step" in variant) else ():
            module.set_gradient_divide_factor(4.0)
            module.set_force_sum_reduction_for_comms(True)
        batches = [batch(dist.get_rank(), step + k) for k in range(PASSES)]
        count = sum((labels >= 0).sum() for _, labels in batches)
        dist.all_reduce(count)
        for k, (tokens, labels) in enumerate(batches):
            net.set_requires_gradient_sync(k == PASSES - 1)
            if variant == "one module out of sync":
                net.inner.set_requires_gradient_sync(False)
            if "by hand" in variant:
                net.unshard()
            loss = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss * times / count).backward()
        optimizer.step()
        optimizer.zero_grad()
