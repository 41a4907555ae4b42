"""Two tensor-parallel ranks whose shards began alike (adapters, scales, heads), for test_shards_of_one_seed.py."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.autograd import Function

WIDTH, INNER, HEADS, WORDS, RANK = 16, 48, 8, 20, 3
FACTORS = ("adapters", "adapters, inputs' factor not summed", "adapters, outputs' factor not summed")
SCALES = ("scale of features", "scale of features, marked", "scale of heads", "scale of heads, marked")
NORMS = ("norm that heads share", "norm that heads share, not summed")
BESIDE = "adapter beside frozen parts"
VARIANTS = (*FACTORS, *SCALES, *NORMS, "bottleneck of one seed", BESIDE)
NOT_SUMMED = {"into.weight": "", "up.into.weight": FACTORS[1], "down.out.weight": FACTORS[2], "norm.weight": NORMS[1]}
"""Copies that get a summand on each rank: what goes into a column-parallel layer's adapter is whole, and so is what
comes out of a row-parallel one's. By the variant that does not add them up."""


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Part(nn.Module):
    """A rank's part of a frozen matrix, with the two factors of an adapter."""

    def __init__(self, full: Tensor, dim: int, adapted: bool) -> None:
        super().__init__()
        part = full.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()
        self.weight = nn.Parameter(part, requires_grad=not adapted)
        torch.manual_seed(5)
        self.adapted = adapted
        if adapted:
            self.into = nn.Linear(part.shape[1], RANK, bias=False)
            self.out = nn.Linear(RANK, part.shape[0], bias=False)
            nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return y + self.out(self.into(x)) if self.adapted else y


class Model(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = dist.get_world_size()
        self.variant = variant
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        adapted = variant in FACTORS
        self.up = Part(torch.randn(INNER, WIDTH) * 0.2, 0, adapted)
        self.down = Part(torch.randn(WIDTH, INNER) * 0.2, 1, adapted)
        inner, heads = INNER // size, HEADS // size
        if variant.startswith("scale"):
            self.scale = nn.Parameter(torch.ones(inner) if "features" in variant else torch.ones(heads, 1))
            if "marked" in variant:
                self.scale.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.norm = nn.RMSNorm(inner // heads)
        if variant == BESIDE:
            self.requires_grad_(False)
            self.into, self.out = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, inner, bias=False)
            nn.init.zeros_(self.out.weight)
        if variant.startswith("bottleneck"):
            torch.manual_seed(7)
            self.narrow, self.widen = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        inner = self.up(Enter.apply(x))
        if self.variant == BESIDE:
            inner = inner + self.out(self.into(Enter.apply(x)))
        heads = inner.unflatten(-1, (HEADS // dist.get_world_size(), -1))
        if self.variant.startswith("scale of heads"):
            heads = heads * self.scale
        elif self.variant.startswith("norm"):
            heads = self.norm(heads)
        inner = torch.tanh(heads.flatten(-2))
        if self.variant.startswith("scale of features"):
            inner = inner * self.scale
        x = x + Leave.apply(self.down(inner))
        if self.variant.startswith("bottleneck"):
            x = x + Leave.apply(self.widen(torch.tanh(self.narrow(Enter.apply(x)))))
        return self.head(x)  # type: ignore[no-any-return]


def batch(k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    tokens, labels = (torch.randint(0, WORDS, (2, 12), generator=generator) for _ in range(2))
    labels[:, 6 + 3 * k :] = -100
    return tokens, labels


def train(variant: str) -> int:
    model = Model(variant)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    for _ in range(3):
        data = [batch(k) for k in range(2)]
        num = sum(int((labels >= 0).sum()) for _, labels in data)
        for tokens, labels in data:
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / num).backward()
        for name, param in model.named_parameters():
            if param.grad is not None and NOT_SUMMED.get(name, variant) != variant:
                dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)
