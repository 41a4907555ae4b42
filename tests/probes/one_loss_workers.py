"""Sequence parallelism below losses that count no tokens, on two ranks, for test_one_loss.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

SIZE, WIDTH, LENGTH, BATCH = 8, 16, 8, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, 6, bias=False)
        self.norm, self.end = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, WIDTH, bias=False), nn.Linear(WIDTH, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.end(h + self.down(torch.tanh(self.up(self.norm(h))))))


def own_part(whole: Tensor, dim: int = 1) -> Tensor:
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def gathered(part: Tensor) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, 1)


def summed_part(whole: Tensor) -> Tensor:
    whole = whole.clone()
    dist.all_reduce(whole)
    return own_part(whole)


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return own_part(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gathered(gradients[0])


class Gather(torch.autograd.Function):
    """All parts of the sequence. `sums`: ranks go on with shards, and the gradients are summands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: bool) -> Tensor:
        ctx.sums = sums
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (summed_part(gradients[0]) if ctx.sums else own_part(gradients[0])), None


class SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed_part(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gathered(gradients[0])


class ByHand(nn.Module):
    """The same net: each rank holds a shard of `up` and `down`, and norms its part of the sequence."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.first, self.norm, self.end, self.last = net.first, net.norm, net.end, net.last
        self.up = nn.Parameter(own_part(net.up.weight.detach(), 0))
        self.down = nn.Parameter(own_part(net.down.weight.detach(), 1))

    def forward(self, x: Tensor) -> Tensor:
        h = Part.apply(self.first(x))
        wide = torch.tanh(Gather.apply(self.norm(h), True) @ self.up.T)
        return self.last(Gather.apply(self.end(h + SumParts.apply(wide @ self.down.T)), False))


def train(run_dir: str, how: str, loss: str) -> None:
    """Train three steps of two passes.

    Args:
        how: "by hand", "by hand, norm left" (its summands are not summed), or "dtensor".
        loss: a function of torch.nn.functional.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net: nn.Module = Net()
    with attach(run_dir, steps=range(3)):
        if how == "dtensor":
            plan = {
                "first": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "end": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
                "last": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
                ),
            }
            parallelize_module(net, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
        else:
            net = ByHand(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        drawn = torch.Generator().manual_seed(3)
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(BATCH, LENGTH, SIZE, generator=drawn)
                y = torch.randn(BATCH, LENGTH, 6, generator=drawn).clamp(0.01, 0.99)
                (getattr(nn.functional, loss)(net(x), y) / 2).backward()
            if how == "by hand":
                for param in (*net.norm.parameters(), *net.end.parameters()):
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
