"""Sequence-parallel ranks of which the last one's part has no labels, for test_empty_parts.py."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

WIDTH, INNER, WORDS, LENGTH, STEPS = 12, 5, 20, 9, 2


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def scattered(x: Tensor) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), 1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts)
    return own


class Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return gathered(grad)


class Gather(Function):
    """What follows is computed alike on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return scattered(grad)


class Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scattered(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return gathered(grad)


class Model(nn.Module):
    def __init__(self, parted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.parted = parted
        torch.manual_seed(1 + dist.get_rank() * parted)
        self.up, self.down = nn.Parameter(torch.randn(INNER, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, INNER) / 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = Split.apply(self.embed(tokens))
        hidden = Enter.apply(self.first(x)) if self.parted else self.first(x)
        hidden = F.linear(torch.tanh(F.linear(hidden, self.up)), self.down)
        x = x + (Leave.apply(hidden) if self.parted else hidden)
        logits: Tensor = self.head(Gather.apply(self.last(x)))
        return logits


def train(summed: str, run_dir: str, parted: bool = True) -> None:
    """`summed`: the gradients of "both" norms, which see a part of the sequence, in a flat copy, or of the "first".
    `parted`: the matrices between them are; else these are copies that see a part of the sequence, too, and are summed
    as the first norm is."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir):
        model = Model(parted)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        parts = [*model.first.parameters(), *(model.last.parameters() if summed == "both" else ())]
        parts = parts if parted else [model.up, model.down, *parts]
        generator = torch.Generator().manual_seed(3)
        for _ in range(STEPS):
            tokens = torch.randint(0, WORDS, (2, LENGTH), generator=generator)
            labels = torch.randint(0, WORDS, (2, LENGTH), generator=generator)
            labels[:, 5 if parted else LENGTH :] = -100
            F.cross_entropy(model(tokens).transpose(1, 2), labels).backward()
            grads = [param.grad for param in parts if param.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, values in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(values.view_as(grad))
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
