"""Three ranks that each hold a part of every parameter and gather it in forward, for test_gathered.py."""

import functools
import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as through
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn

STEPS, ACCUMULATION, CLASSES, WIDTH = 3, 2, 12, 9


def gathered(part: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return parts


class Gather(torch.autograd.Function):
    """The parts of all ranks along a dimension, `length` elements of them; a reduce-scatter in backward, divided."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, length: int, divisor: float, dim: int) -> Tensor:
        ctx.size, ctx.divisor, ctx.dim = part.numel(), divisor, dim
        return torch.cat(gathered(part), dim) if dim else torch.cat(gathered(part))[:length]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.dim:
            whole = grad.clone()
            dist.all_reduce(whole)
            return whole.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()] / ctx.divisor, None, None, None
        whole = grad.new_zeros(ctx.size * dist.get_world_size())
        whole[: grad.numel()] = grad
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, whole)
        return own / ctx.divisor, None, None, None


class HandOn(torch.autograd.Function):
    """A parameter as it is; summed in backward over a group of ranks, None for all of them."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        summed = grad.clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


@functools.cache
def itself() -> dist.ProcessGroup:
    """A group of tensor-parallel ranks, which is this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


class Turned(torch.autograd.Function):
    """Every rank's part, in an order that nobody knows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return torch.cat(gathered(part)[::-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        whole = grad.clone()
        dist.all_reduce(whole)
        return whole.chunk(dist.get_world_size())[::-1][dist.get_rank()]


class GatheredProduct(torch.autograd.Function):
    """A linear layer of what all ranks put in, as one of sequence parallelism. Its weight goes nowhere."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        whole = torch.empty(dist.get_world_size() * given.shape[0], given.shape[1])
        dist.all_gather_into_tensor(whole, given.contiguous())
        ctx.save_for_backward(whole, weight)
        return whole @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        whole, weight = ctx.saved_tensors
        own = grad.new_empty(whole.shape[0] // dist.get_world_size(), whole.shape[1])
        dist.reduce_scatter_tensor(own, grad @ weight)
        return own, grad.T @ whole


class OfAll(nn.Module):
    """A layer that multiplies what all ranks put in, and gives each its own rows."""

    def __init__(self, variant: str, width: int, out: int) -> None:
        super().__init__()
        self.variant = variant
        self.first = nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(out, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        given = torch.tanh(self.first(x))
        if "strided" in self.variant:  # the function copies it
            given = given.T.contiguous().T
        whole: Tensor = GatheredProduct.apply(given, self.weight)
        return whole.chunk(dist.get_world_size())[dist.get_rank()]


class OfNext(torch.autograd.Function):
    """What the next rank put in."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return gathered(given)[(dist.get_rank() + 1) % dist.get_world_size()]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gathered(grad)[dist.get_rank() - 1]


class Swapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        swapped: Tensor = OfNext.apply(x)
        return swapped


class Parts(nn.Module):
    """A linear layer of which each rank holds a part."""

    def __init__(self, variant: str, width: int, out: int) -> None:
        super().__init__()
        self.variant, self.shape = variant, (out, width)
        self.divisor = float(dist.get_world_size()) if "averaged" in variant else 2.0 if "halved" in variant else 1.0
        whole = [torch.randn(out, width) * 0.3, torch.ones(out)]
        if "handed on" not in variant and "itself" not in variant:
            whole = [self.own(one, 1 if "columns" in variant and one.dim() > 1 else 0) for one in whole]
        self.weight, self.bias = map(nn.Parameter, whole)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        if dim:
            return whole.chunk(size, dim)[rank].contiguous()
        flat = F.pad(whole.flatten(), (0, -whole.numel() % size))
        return flat.chunk(size)[rank].clone()

    def whole(self) -> tuple[Tensor, Tensor]:
        (out, width), variant = self.shape, self.variant
        if "handed on" in variant:
            return HandOn.apply(self.weight, None), HandOn.apply(self.bias, None)
        if "itself" in variant:
            return (HandOn.apply(self.weight, itself()) + self.weight) / 2, HandOn.apply(self.bias, itself())
        if "torch's own" in variant:
            weight, bias = (torch.cat(through.all_gather(one)) for one in (self.weight, self.bias))
            return weight.view(self.shape), bias[:out]
        if "turned" in variant:
            return Turned.apply(self.weight).view(self.shape), Turned.apply(self.bias)
        if "columns" in variant:
            return Gather.apply(self.weight, 0, self.divisor, 1), Gather.apply(self.bias, out, self.divisor, 0)
        if "flat" in variant:
            both = Gather.apply(torch.cat([self.weight, self.bias]), None, self.divisor, 0)
            rows = both.view(dist.get_world_size(), -1)
            return rows[:, : self.weight.numel()].reshape(self.shape), rows[:, self.weight.numel() :].flatten()
        cast = (lambda one: one.bfloat16()) if "bfloat16" in variant else (lambda one: one)
        weight = Gather.apply(cast(self.weight), out * width, self.divisor, 0).float()
        return weight.view(self.shape), Gather.apply(cast(self.bias), out, self.divisor, 0).float()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.whole())


def train(variant: str) -> int:
    """Losses divide by the tokens of all ranks, and are multiplied by the number of ranks where the function divides by
    it, but for "averaged twice"."""
    torch.manual_seed(0)
    out, width = 10 if "padded" in variant else CLASSES, WIDTH
    if "wide" in variant:  # biases have enough elements to be known by themselves
        out, width = 96, 192
    model = nn.Sequential(Parts(variant, 6, width), nn.Tanh(), Parts(variant, width, out))
    if "input" in variant:
        model = nn.Sequential(Swapped(), nn.Linear(6, out))
    if "activations" in variant:
        model = nn.Sequential(OfAll(variant, 6, out))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        data = []
        for k in range(ACCUMULATION):
            labels = torch.randint(out, (9,), generator=generator)
            labels[3 + 2 * dist.get_rank() + k :] = -100
            data.append((torch.randn(9, 6, generator=generator), labels))
        num_tokens = torch.tensor(sum(int((labels >= 0).sum()) for _, labels in data))
        dist.all_reduce(num_tokens)
        scale = dist.get_world_size() if "averaged" in variant and "twice" not in variant else 1
        for features, labels in data:
            features.requires_grad_("input" in variant)
            (F.cross_entropy(model(features), labels, reduction="sum") * scale / num_tokens).backward()
        by_hand = any(word in variant for word in ("activations", "input", "itself"))
        for param in model.parameters() if by_hand else ():
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(torch.cat([param.detach().flatten() for param in model.parameters()]).numpy().tobytes())


def run(variants: list[str], folder: str, first: int = 0) -> list[tuple[int, int]]:
    return with_and_without(train, variants, folder, range(first, STEPS))
