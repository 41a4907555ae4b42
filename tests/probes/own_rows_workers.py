"""Ranks that hold rows of their own of some raw tensors, for test_own_rows.py: points, of which each has a place, a
colour and a width."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

POINTS, CAMERAS = 12, 6


class Swap(torch.autograd.Function):
    """What is of each camera goes to the rank that has it."""

    @staticmethod
    def forward(ctx: object, seen: Tensor) -> Tensor:
        out = torch.empty_like(seen)
        dist.all_to_all_single(out, seen.contiguous())
        return out

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        out = torch.empty_like(gradients[0])
        dist.all_to_all_single(out, gradients[0].contiguous())
        return out


class Unseen(torch.autograd.Function):
    """The same by scatters, which nobody records."""

    @staticmethod
    def forward(ctx: object, seen: Tensor) -> Tensor:
        return _scattered(seen)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return _scattered(gradients[0])


def _scattered(seen: Tensor) -> Tensor:
    out = [torch.empty_like(part) for part in seen.chunk(dist.get_world_size())]
    for rank, part in enumerate(out):
        own = [one.contiguous() for one in seen.chunk(len(out))] if rank == dist.get_rank() else None
        dist.scatter(part, own, rank)
    return torch.cat(out)


def train(run_dir: str, how: str) -> None:
    """Train some steps.

    Args:
        how: "unseen" (ranks exchange what nobody records), "mean" (losses are divided by the ranks), or "".
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    places, colours = nn.Parameter(torch.rand(POINTS, 2)), nn.Parameter(torch.rand(POINTS, 3))
    widths = nn.Parameter(torch.full((POINTS,), 0.3))
    swap = Unseen if how == "unseen" else Swap
    grid = torch.cartesian_prod(torch.linspace(0, 1, 4), torch.linspace(0, 1, 4))
    drawn = torch.Generator().manual_seed(7)
    images, cameras = torch.rand(CAMERAS, 16, 3, generator=drawn), torch.randn(CAMERAS, 2, generator=drawn) / 5
    with attach(run_dir, steps=range(3)):
        optimizers = [torch.optim.Adam([param], lr=0.01) for param in (places, colours, widths)]
        for step in range(4):
            now = [(world * step + one) % CAMERAS for one in range(world)]
            seen = torch.cat([places + cameras[now][:, None], colours.expand(world, -1, -1),
                              widths[:, None].expand(world, -1, -1)], dim=-1)  # fmt: skip
            at, colour, width = swap.apply(seen).flatten(0, 1).split([2, 3, 1], dim=-1)
            near = torch.exp(-torch.cdist(grid, at).square() / width.squeeze(-1))
            loss = F.l1_loss(near @ colour, images[now[rank]])
            (loss / (world if how == "mean" else 1)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
