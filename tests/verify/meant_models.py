"""What a module does to a hidden tensor: right, wrong, or other than the derivative on purpose."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verify_models import VOCAB, WIDTH, Scaled

Body = Callable[[Any, Tensor], Tensor]


class Middle(nn.Module):
    """`body` between an embedding and a head."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Around(nn.Module):
    def __init__(self, body: Body, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, WIDTH, sparse=sparse)
        self.middle, self.head = Middle(body), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)))


class LateMask(torch.autograd.Function):
    """ReLU whose backward lets a little of the negative side through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (ctx.saved_tensors[0] >= -0.2)


class Untransposed(torch.autograd.Function):
    """A linear layer whose backward forgets to transpose the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), torch.einsum("bto,bti->oi", grad, x)


class Unconjugated(torch.autograd.Function):
    """A complex product whose backward forgets to conjugate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return grad * y, grad * x


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class RunAgain(torch.autograd.Function):
    """Checkpointing as Megatron-LM does it: backward of the region is called inside of backward."""

    @staticmethod
    def forward(ctx: Any, region: Callable[[Tensor], Tensor], factor: float, x: Tensor) -> Tensor:
        ctx.region, ctx.factor = region, factor
        ctx.save_for_backward(x)
        with torch.no_grad():
            return region(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.region(x)
        torch.autograd.backward(y, ctx.factor * grad)
        return None, None, x.grad


def block(m: Middle, x: Tensor) -> Tensor:
    return m.b(F.gelu(m.a(x)))


def clipped(m: Middle, x: Tensor) -> Tensor:
    hidden = m.a(x)
    if hidden.requires_grad:
        hidden.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return x + m.b(hidden)


def scaled_by_a_constant(m: Middle, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.a(x).abs().mean()
    return x + m.b(m.a(x) / size)


def symmetric(m: Middle, x: Tensor) -> Tensor:
    """SimSiam: each view is to predict the other, which gets no gradient."""
    one, other = m.a(x), m.a(x.flip(1))
    loss = F.cosine_similarity(m.b(one), other.detach(), -1) + F.cosine_similarity(m.b(other), one.detach(), -1)
    return x * loss.unsqueeze(-1)


def quantized(m: Middle, x: Tensor) -> Tensor:
    """VQ-VAE: straight through to the nearest row, which is drawn to what it stands for."""
    z = m.a(x)
    rows = m.b.weight
    nearest = rows[torch.cdist(z.flatten(0, 1), rows).argmin(-1)].view_as(z)
    commit = (nearest - z.detach()).square().mean() + 0.25 * (z - nearest.detach()).square().mean()
    return (z + (nearest - z).detach()) * (1 + commit)


RIGHT: dict[str, Body] = {
    "a reentrant checkpoint": lambda m, x: x + checkpoint(lambda y: block(m, y), x, use_reentrant=True),
    "a checkpoint by hand": lambda m, x: x + RunAgain.apply(lambda y: block(m, y), 1.0, x),
    "changed in place": lambda m, x: m.b(F.relu_(m.a(x)).add(x)).add_(1),
    "a largest value taken off": lambda m, x: x + m.b((m.a(x) - m.a(x).amax(-1, keepdim=True).detach()).softmax(-1)),
    "complex": lambda m, x: x + torch.fft.irfft(torch.fft.rfft(m.a(x)) * torch.fft.rfft(m.b.bias), n=WIDTH),
    "called twice": lambda m, x: x + m.a(F.gelu(m.a(x))),
}

MEANT: dict[str, tuple[Body, str]] = {
    "a detached part": (lambda m, x: block(m, 0.1 * x + 0.9 * x.detach()) + x, "detach"),
    "a constant of no_grad": (scaled_by_a_constant, "no_grad"),
    "old .data": (lambda m, x: x + m.b(m.a(x) * m.a(x).data.sigmoid()), ".data"),
    "an item": (lambda m, x: x + m.b(m.a(x)) * m.a(x).square().mean().item(), "item"),
    "straight through by detach": (lambda m, x: x + m.b(m.a(x) + (m.a(x).sign() - m.a(x)).detach()), "detach"),
    "straight through by a function": (lambda m, x: x + m.b(Sign.apply(m.a(x))), "does not depend"),
    "reversal": (lambda m, x: x + m.b(Scaled.apply(m.a(x), -0.3)), "other sign"),
    "SimSiam": (symmetric, "detach"),
    "VQ-VAE": (quantized, "detach"),
}

WRONG: dict[str, Body] = {
    "a mask": lambda m, x: x + m.b(LateMask.apply(m.a(x))),
    "a transpose": lambda m, x: x + Untransposed.apply(m.a(x), m.b.weight),
    "a conjugate": lambda m, x: (
        x + torch.fft.irfft(Unconjugated.apply(torch.fft.rfft(m.a(x)), torch.fft.rfft(m.b.bias)), n=WIDTH)
    ),
    "a checkpoint by hand": lambda m, x: x + RunAgain.apply(lambda y: block(m, y), 2.0, x),
    "a factor beside a detach": lambda m, x: x + m.b(Scaled.apply(m.a(x), 3.0)) * m.a(x).detach(),
}
PERHAPS: dict[str, tuple[Body, list[str]]] = {
    "a factor": (lambda m, x: x + m.b(Scaled.apply(m.a(x), 3.0)), ["warning"]),
    "a factor behind a reversal": (
        lambda m, x: x + m.b(Scaled.apply(Scaled.apply(m.a(x), -1.0), 3.0)),
        ["info", "warning"],
    ),
}
"""Functions that hand on their input, with what each of them is told as."""
