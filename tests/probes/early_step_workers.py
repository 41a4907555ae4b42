"""Two ranks whose optimizers step with what is not reduced yet, or of which one alone gets what all have."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, record_each
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel

VARIANTS = ("in hooks on parameters", "behind the reducer", "gathered and sent back", "gathered by one rank")
STEPS = 3


def run(folder: str) -> None:
    record_each(folder, VARIANTS, train)


def train(variant: str) -> None:
    torch.manual_seed(0)
    net: nn.Module = Net()
    wrapped = not variant.startswith("gathered")
    model = DistributedDataParallel(net) if wrapped else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if variant == "in hooks on parameters":
        step_in_hooks(net)
    elif wrapped:
        step_behind_reducer(net, optimizer)
    for step in range(STEPS):
        tokens, labels = batch(dist.get_rank(), step)
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        (loss * (dist.get_world_size() if wrapped else 1) / count).backward()
        if not wrapped:
            for param in net.parameters():
                gather(param, sends_back=variant == "gathered and sent back")
            optimizer.step()
            optimizer.zero_grad()


def step_in_hooks(net: nn.Module) -> None:
    """Each parameter has an optimizer of its own, which a hook calls as its gradient is accumulated."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in net.parameters()}

    def step(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(step)


def step_behind_reducer(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer steps inside of backward, in a callback behind the one in which the reducer ends."""
    engine: Any = Variable._execution_engine

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def queue(_: Tensor) -> None:
        engine.queue_callback(lambda: engine.queue_callback(finish))

    next(net.parameters()).register_post_accumulate_grad_hook(queue)


def gather(param: nn.Parameter, *, sends_back: bool) -> None:
    """One rank gathers all ranks' gradients and adds them up, which the others are sent or not."""
    grad = param.grad
    assert grad is not None
    first = dist.get_rank() == 0
    found = [torch.empty_like(grad) for _ in range(dist.get_world_size())] if first else None
    dist.gather(grad, found, 0)
    if found:
        grad.copy_(torch.stack(found).sum(0))
    if sends_back:
        dist.broadcast(grad, 0)
