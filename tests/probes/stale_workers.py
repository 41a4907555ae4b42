"""Two ranks of FSDP, whose modules are gathered before the optimizer steps, and behind it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, record_each
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

WHERE = ("nowhere", "before the step", "behind the step", "before the step, resharded", "not resharded", "prefetched",
         "before the step, in both modes")  # fmt: skip
VARIANTS = tuple(f"{kind}: {where}" for kind in ("fsdp1", "fsdp2") for where in WHERE[:3]) + tuple(
    f"fsdp2: {where}" for where in WHERE[3:]
)
CLIPPED = "fsdp2: clipped as a whole, never reduced"
OWNERS = ("owners: all sent", "owners: none sent", "owners: one not sent", "owners: none sent, nothing moves")
STEPS = 3


def run(folder: str) -> None:
    # In one process group: a second one may read in the store where ranks listened in the first.
    record_each(
        folder, (*VARIANTS, CLIPPED, *OWNERS), lambda variant: (step_apart if variant in OWNERS else train)(variant)
    )


def train(variant: str) -> None:
    torch.manual_seed(0)
    kind, _, where = variant.partition(": ")
    net = Net()
    model = nn.Module()
    if kind == "fsdp2":
        fully_shard(net.inner, mesh=init_device_mesh("cpu", (2,)))
        model = fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        tokens, labels = batch(dist.get_rank(), step)
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        if where == "not resharded" or variant == CLIPPED:
            model.set_reshard_after_backward(False)
        if variant == CLIPPED:
            model.set_requires_gradient_sync(False)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        (loss * 2 / count).backward()
        if "before the step" in where:
            with torch.no_grad():
                model(tokens)
        if "resharded" in where and "before" in where:
            model.reshard()
        if where == "prefetched":
            model.unshard()
        if variant == CLIPPED:
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        if where == "behind the step" or "both modes" in where:
            with torch.no_grad():
                model(tokens)


def step_apart(variant: str) -> None:
    """Each parameter is stepped by one rank, and sent to the other."""
    torch.manual_seed(0)
    net = Net()
    params = list(net.parameters())
    rate = 0.0 if "nothing moves" in variant else 0.1
    optimizer = torch.optim.SGD([param for at, param in enumerate(params) if at % 2 == dist.get_rank()], lr=rate)
    lost = params if "none sent" in variant else params[:1] if "one not sent" in variant else []
    for step in range(STEPS):
        tokens, labels = batch(dist.get_rank(), step)
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        (F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count).backward()
        for param in params:
            dist.all_reduce(param.grad)
        optimizer.step()
        for at, param in enumerate(params):
            if all(param is not other for other in lost):
                dist.broadcast(param.data, at % 2)
            param.grad = None
