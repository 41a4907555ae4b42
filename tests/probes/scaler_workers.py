"""Experts on one rank each, whose gradients are sums over all ranks' tokens while the rest is averaged: what divides
them by the ranks lies in the model (ColossalAI, MegaBlocks), or nowhere."""

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

K, STEPS, VOCABULARY, WIDTH, LENGTH = 3, 3, 32, 16, 8


class Scaled(torch.autograd.Function):
    """Hands its input on, and multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Exchanged(torch.autograd.Function):
    """An all-to-all of equal parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        received = torch.empty_like(grad)
        dist.all_to_all_single(received, grad.contiguous())
        return received


class Mixture(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant, self.ranks = variant, dist.get_world_size()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        weight, bias = self.expert.weight, self.expert.bias
        routed = Exchanged.apply(hidden.flatten(0, 1))  # type: ignore[no-untyped-call]
        if self.variant == "functions on parameters":
            weight, bias = (Scaled.apply(one, 1 / self.ranks) for one in (weight, bias))  # type: ignore[no-untyped-call]
        if self.variant == "hooks around experts":
            routed = routed * 1
            routed.register_hook(lambda grad: grad * self.ranks)
        done = torch.tanh(F.linear(routed, weight, bias))
        if self.variant == "hooks around experts":
            done.register_hook(lambda grad: grad / self.ranks)
        return self.head(hidden + Exchanged.apply(done).view_as(hidden))  # type: ignore[no-untyped-call]


def train(folder: str) -> list[tuple[float, float]]:
    dist.init_process_group("gloo")
    variants = ["nowhere", "functions on parameters", "hooks around experts"]
    return [(_train(variant, None), _train(variant, Path(folder) / variant)) for variant in variants]


def _train(variant: str, run_dir: Path | None) -> float:
    from gradcheck_dist.probes import attach

    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        model = Mixture(variant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(10 + dist.get_rank())
        for _ in range(STEPS):
            drawn = torch.randint(VOCABULARY, (K, 2, 2, LENGTH), generator=generator)
            drawn[:, 1, :, 2 + 2 * dist.get_rank() :] = -100
            num_tokens = (drawn[:, 1] >= 0).sum()
            dist.all_reduce(num_tokens)
            for tokens, labels in drawn.unbind(0):
                logits = model(tokens).flatten(0, 1)
                loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
                (loss * dist.get_world_size() / num_tokens).backward()
            for param in (*model.embedding.parameters(), *model.head.parameters()):
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    return sum(param.double().sum().item() for param in model.parameters())


class Summed(torch.autograd.Function):
    """Hands its input on, and sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        summed = grad.contiguous().clone()
        dist.all_reduce(summed)
        return summed


def train_summed(folder: str) -> list[tuple[float, float]]:
    dist.init_process_group("gloo")
    halved = _train_summed(Path(folder) / "halved", of_both=True)
    return [(_train_summed(None), _train_summed(Path(folder) / "summed")), (_train_summed(None, of_both=True), halved)]


def _train_summed(run_dir: Path | None, *, of_both: bool = False) -> float:
    from gradcheck_dist.probes import attach

    with attach(run_dir) if run_dir is not None else contextlib.nullcontext():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for tokens, labels in torch.randint(VOCABULARY, (STEPS, 2, 2, LENGTH)).unbind(0):
            logits = Summed.apply(model(tokens))  # type: ignore[no-untyped-call]
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (loss / 2 if of_both else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sum(param.double().sum().item() for param in model.parameters())
