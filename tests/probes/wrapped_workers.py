"""Two ranks below DDP that leaves some gradients unreduced, each variant for a reason of its own."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, record_each
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

VARIANTS = ("backward again", "backward again in unequal passes", "bias outside", "no_sync", "idle hook",
            "replicate, never in sync", "one wrapper out of sync", "past the wrapper", "part left out")  # fmt: skip
IN_NO_SYNC = ("no_sync", "one wrapper out of sync")
STEPS = 2


class WithSpare(nn.Module):
    """A part of it takes no part in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = Net(), nn.Linear(2, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net(tokens)


def run(folder: str) -> None:
    record_each(folder, VARIANTS, train)


def train(variant: str) -> None:
    torch.manual_seed(0)
    net = replicate(Net()) if variant.startswith("replicate") else DistributedDataParallel(Net())
    if variant == "part left out":
        net = DistributedDataParallel(WithSpare())
    if variant == "idle hook":
        net.register_comm_hook(None, noop_hook)
    if variant == "replicate, never in sync":
        net.set_requires_gradient_sync(False)
    if variant == "one wrapper out of sync":
        net = Net()
        for name, module in list(net.named_children()):
            setattr(net, name, DistributedDataParallel(module))
    outside = nn.Linear(1, 20) if variant == "bias outside" else None
    params = [*net.parameters(), *(outside.parameters() if outside is not None else ())]
    optimizer = torch.optim.SGD(params, lr=0.1)
    passes = 1 + dist.get_rank() if variant == "backward again in unequal passes" else 1
    model = net.module if variant == "past the wrapper" else net
    for step in range(1 if variant == "part left out" else STEPS):  # DDP refuses a second one
        batches = [batch(dist.get_rank(), step + k) for k in range(passes)]
        count = sum((labels >= 0).sum() for _, labels in batches)
        dist.all_reduce(count)
        for k, (tokens, labels) in enumerate(batches):
            quiet = net.inner if variant == "one wrapper out of sync" else net
            with quiet.no_sync() if variant in IN_NO_SYNC or k < passes - 1 else nullcontext():
                logits = model(tokens) + (outside(torch.ones(1)) if outside is not None else 0)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loss = loss * dist.get_world_size() / count
                if variant.startswith("backward again") and k == 0:
                    loss.backward(retain_graph=True)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
