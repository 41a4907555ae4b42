"""Layers whose activations ranks sum by hand, for combined_workers.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gathered_workers import HandOn
from torch import Tensor, nn


class Row(torch.autograd.Function):
    """The sum of what tensor-parallel ranks computed of their rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Parted(nn.Module):
    """Two linear layers of which each rank has columns, and rows."""

    def __init__(self, width: int, part: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, generator = group, torch.Generator().manual_seed(part)
        self.up = nn.Parameter(torch.randn(10, width, generator=generator) / 3)
        self.down = nn.Parameter(torch.randn(width, 10, generator=generator) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(F.linear(HandOn.apply(x, self.group), self.up))
        return x + Row.apply(F.linear(hidden, self.down), self.group)


class Whole(nn.Module):
    """A layer that ranks with parts of a row all compute on the whole of it; backward sums their parts."""

    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.wide = group, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        whole = Row.apply(x.sum(1, keepdim=True), self.group) / 8
        return x + HandOn.apply(torch.tanh(self.wide(whole)), self.group)
