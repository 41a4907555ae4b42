"""Small models whose backward is right, or wrong in one way."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH = 20, 16


class Scaled(torch.autograd.Function):
    """Identity whose backward multiplies by a factor: 0.5 is a fault, -1 gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.factor * grad, None


class Ignoring(torch.autograd.Function):
    """x**2 / 2 whose backward is right for a gradient of ones only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square() / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0]


class AddedLoss(torch.autograd.Function):
    """Identity that puts the gradient of an auxiliary loss into backward, as Megatron's MoEAuxLossAutoScaler does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones_like(ctx.saved_tensors[0])


class WrongNorm(torch.autograd.Function):
    """RMS norm whose backward takes the root mean square for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        return grad * scale * weight, (grad * x * scale).flatten(0, -2).sum(0)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return WrongNorm.apply(x, self.weight)


class Layer(nn.Module):
    """Two linear layers around an activation, with dropout and a residual; `fault` sits between them."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.norm = Norm() if fault == "norm" else nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("num_calls", torch.zeros(1))
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1  # type: ignore[operator]
        self.history.append(len(self.history))
        hidden = F.gelu(self.up(self.norm(x)))
        if self.fault in ("scaled", "reversed"):
            hidden = Scaled.apply(hidden, 0.5 if self.fault == "scaled" else -1.0)
        elif self.fault == "ignoring":
            hidden = Ignoring.apply(hidden)
        elif self.fault == "detached":
            hidden = hidden.detach()
        elif self.fault == "hook" and hidden.requires_grad:
            hidden.register_hook(lambda grad: 0.5 * grad)
        elif self.fault == "added loss":
            hidden = AddedLoss.apply(hidden, hidden.square().mean())
        elif self.fault == "relu":
            hidden = F.relu(hidden)
        return x + self.dropout(self.down(hidden))


class Model(nn.Module):
    """Embedding, two layers of which the second is faulty, batch norm, head; logits (batch, seq, VOCAB)."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(""), Layer(fault)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.flatten(0, 1))).unflatten(0, tokens.shape)


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return (
        torch.randint(0, VOCAB, (2, 8), generator=generator),
        torch.randint(0, VOCAB, (2, 8), generator=generator),
    )


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()
