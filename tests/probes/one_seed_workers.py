"""Two tensor-parallel ranks of which some or all shards were drawn from one seed, also under sequence parallelism, for
test_shards_of_one_seed.py."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from shard_workers import INNER, WIDTH, WORDS, Enter, Leave
from torch import Tensor, nn
from torch.autograd import Function

from gradcheck_dist.events import MAX_EXCHANGES_ALIKE

DEEP = "sequence, deep"
"""So many layers that the sum behind the last one, whose shards alone are of one seed, is not recorded any more."""
OPEN = {
    "head": ["head.weight"],
    "head, one part used": ["head.weight"],
    "all, dropout": ["down.weight", "up.weight"],
    "all, dropout, inner norm": ["down.weight", "inner_norm.weight", "up.weight"],
    "all, dropout, sequence": ["down.weight", "up.weight"],
}
"""Variants that lack no sum, and the parameters that nothing tells from copies."""
CLEAN = ("all", "sequence", DEEP)
NOT_SUMMED = "sequence, norm not summed"


def parts(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def own(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def summed(tensor: Tensor) -> Tensor:
    whole = tensor.contiguous().clone()
    dist.all_reduce(whole)
    return whole


class Gather(Function):
    """All ranks' parts; what goes on is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return torch.cat(parts(x), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return own(grad, ctx.dim), None


class GatherSequence(Function):
    """All ranks' tokens, of which each rank's shards compute a summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cat(parts(x), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return own(summed(grad), 1)


class ScatterSequence(Function):
    """The own tokens of the sum of all ranks' summands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return own(summed(x), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat(parts(grad), 1)


class Split(Function):
    """The own tokens of what all ranks hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return own(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat(parts(grad), 1)


class Inner(nn.Module):
    """A rank's shards of two layers, which in the last one are the same on all ranks."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        last = layer == MAX_EXCHANGES_ALIKE - 1
        torch.manual_seed(100 + layer if last else 100 + layer + 1000 * dist.get_rank())
        inner = INNER // dist.get_world_size()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.variant, rank = variant, dist.get_rank()
        part = 0 if variant.startswith("all") else rank
        inner = INNER // dist.get_world_size()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        for layer, whole, dim in ((self.up, torch.randn(INNER, WIDTH), 0), (self.down, torch.randn(WIDTH, INNER), 1)):
            layer.weight = nn.Parameter(0.2 * whole.chunk(dist.get_world_size(), dim)[part].clone())
        self.norm = nn.RMSNorm(WIDTH) if "sequence" in variant else nn.Identity()
        self.inner_norm = nn.RMSNorm(inner) if "inner norm" in variant else nn.Identity()
        torch.manual_seed(7)
        self.head = nn.Linear(WIDTH, WORDS // 2 if "head" in variant else WORDS, bias=False)
        self.generator = torch.Generator().manual_seed(100 + rank)

        self.layers = nn.ModuleList(Inner(layer) for layer in range(MAX_EXCHANGES_ALIKE) if variant == DEEP)

    def inside(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner_norm(self.up(x)))
        if "dropout" in self.variant:
            x = x * (torch.rand(x.shape, generator=self.generator) > 0.2) / 0.8
        return self.down(x)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if "sequence" in self.variant:
            x = Split.apply(x)
            h = GatherSequence.apply(self.norm(x))
            x = x + ScatterSequence.apply(self.inside(h))
            for layer in self.layers:
                x = x + ScatterSequence.apply(layer(h))
                h = GatherSequence.apply(x)
            return self.head(Gather.apply(x, 1))  # type: ignore[no-any-return]
        x = x + Leave.apply(self.inside(Enter.apply(x)))
        if "head" not in self.variant:
            return self.head(x)  # type: ignore[no-any-return]
        logits = Gather.apply(self.head(Enter.apply(x)), -1)
        return logits[..., : WORDS // 2] if "one part" in self.variant else logits  # type: ignore[no-any-return]


def batch(k: int) -> tuple[Tensor, Tensor]:
    """Of the first pass the second half of each sequence has no labels."""
    generator = torch.Generator().manual_seed(k)
    tokens, labels = (torch.randint(0, WORDS // 2, (2, 12), generator=generator) for _ in range(2))
    labels[:, 6 + 3 * k :] = -100
    return tokens, labels


def train(variant: str) -> int:
    model = Model(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        data = [batch(k) for k in range(2)]
        num = sum(int((labels >= 0).sum()) for _, labels in data)
        for tokens, labels in data:
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / num).backward()
        if "sequence" in variant and variant != NOT_SUMMED:
            dist.all_reduce(model.norm.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, [*OPEN, *CLEAN, NOT_SUMMED], folder)
