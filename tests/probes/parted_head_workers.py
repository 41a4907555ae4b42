"""A head whose classes ranks share out, on what they gathered, for test_parted_head.py: all compute one loss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SIZE, CLASSES, BATCH = 6, 8, 5


class Gathered(torch.autograd.Function):
    """All ranks' rows. What comes back is summed, and multiplied for the average that follows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, times: float) -> tuple[Tensor, ...]:
        ctx.times = times
        found = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(found, rows)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = torch.stack(gradients)
        dist.all_reduce(summed)
        return summed[dist.get_rank()] * ctx.times, None


class OverShards(torch.autograd.Function):
    """The mean cross-entropy over classes of which each rank has some."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mine: Tensor) -> Tensor:
        top = scores.amax(dim=1, keepdim=True)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        powers = (scores - top).exp()
        total = powers.sum(dim=1, keepdim=True)
        dist.all_reduce(total)
        shares = powers / total
        ctx.save_for_backward(shares, mine)
        picked = (shares * mine).sum(dim=1)
        dist.all_reduce(picked)
        return -picked.log().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        shares, mine = ctx.saved_tensors
        return (shares - mine) / len(shares) * gradients[0], None


def train(run_dir: str, how: str, first: int = 0) -> float:
    """Train some steps; how far the first gradients are from those of one process, relative.

    Args:
        how: "one seed" (all parts of the head began alike), "once" (what comes back is not multiplied), or "".
        first: the first step that is recorded.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    body = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)))
    torch.manual_seed(1 if how == "one seed" else 1 + rank)
    head = nn.Linear(SIZE, CLASSES // world, bias=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    drawn, off = torch.Generator().manual_seed(3), 0.0
    with attach(run_dir, steps=range(first, 3)):
        for step in range(3):
            images = torch.randn(world, BATCH, 4, generator=drawn)
            labels = torch.randint(0, CLASSES, (world * BATCH,), generator=drawn)
            rows = torch.cat(Gathered.apply(body(images[rank]), 1.0 if how == "once" else float(world)))
            mine = nn.functional.one_hot(labels, CLASSES).float().chunk(world, dim=1)[rank]
            OverShards.apply(head(rows), mine).backward()
            if not step:
                off = _off(body.module, head, images.flatten(0, 1), labels)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    return off


def _off(body: nn.Module, head: nn.Linear, images: Tensor, labels: Tensor) -> float:
    parts = [torch.empty_like(head.weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, head.weight.detach())
    whole = torch.cat(parts).requires_grad_()
    wanted = torch.autograd.grad(
        nn.functional.cross_entropy(body(images) @ whole.T, labels), [*body.parameters(), whole]
    )
    wanted = (*wanted[:-1], wanted[-1].chunk(len(parts))[dist.get_rank()])
    got = [param.grad for param in (*body.parameters(), head.weight)]
    return max(float((one - other).norm() / other.norm()) for one, other in zip(got, wanted, strict=True))
