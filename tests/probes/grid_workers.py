"""Tensor parallelism over a grid of four ranks, as SUMMA does it, for test_grid.py: a rank holds a tile of each matrix
and works on the batch of its row, and one function communicates along the row and the column."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from combined_workers import STEPS, VOCABULARY, WIDTH, batch, count, token_sum
from torch import Tensor, nn
from torch.autograd import Function


def gathered(x: Tensor, group: Any, dim: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def scattered(x: Tensor, group: Any, dim: int) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(2, dim)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


class Product(Function):
    """The columns of this rank of a product with a matrix that lies in tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tile: Tensor, row: Any, column: Any) -> Tensor:
        ctx.groups = row, column
        ctx.save_for_backward(x, tile)
        return gathered(x, row, -1) @ gathered(tile, column, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        (x, tile), (row, column) = ctx.saved_tensors, ctx.groups
        whole, columns = gathered(x, row, -1), gathered(tile, column, 0)
        of_row = whole.flatten(0, 1).t() @ grad.flatten(0, 1)
        return scattered(grad @ columns.t(), row, -1), scattered(of_row, column, 0), None, None


class Joined(Function):
    """All columns; each rank of the row has the whole loss of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Any) -> Tensor:
        ctx.number = dist.get_rank(row)
        return gathered(x, row, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.chunk(2, -1)[ctx.number].contiguous(), None


def train(computed: bool, run_dir: str) -> None:
    """`computed`: products are with what is computed from the tiles, as a cast is."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    i, j = divmod(dist.get_rank(), 2)
    row = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][i]
    column = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][j]
    torch.manual_seed(0)
    wholes = [0.3 * torch.randn(VOCABULARY, WIDTH), 0.3 * torch.randn(WIDTH, VOCABULARY)]
    tiles = nn.ParameterList(nn.Parameter(one.chunk(2, 0)[i].chunk(2, 1)[j].clone()) for one in wholes)
    optimizer = torch.optim.SGD(tiles, lr=0.1)
    with attach(run_dir):
        for step in range(STEPS):
            data = [batch(step, 10 * k + i) for k in range(2)]
            tokens = count(data)
            dist.all_reduce(tokens, group=column)
            for x, y in data:
                hidden = nn.functional.one_hot(x, VOCABULARY).float().chunk(2, -1)[j]
                for tile in tiles:
                    hidden = Product.apply(torch.tanh(hidden), tile * 1.0 if computed else tile, row, column)
                (token_sum(Joined.apply(hidden, row), y) / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
