"""Trainers for `test_literal_fixes.py`: each with faults, and each fault with the mend that its finding names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.probes import attach

NUM_WORDS, WIDTH, HIDDEN, STEPS = 24, 8, 40, 2


def run(trainer: str, fault: str, run_dir: str) -> None:
    dist.init_process_group("gloo")
    try:
        with attach(run_dir, steps="0:2"):
            TRAINERS[trainer](fault)
    finally:
        dist.destroy_process_group()


class SumBack(torch.autograd.Function):
    """Sums in forward, and hands on what arrives: all go on alike."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        total = given.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return arrived, None


class Gather(torch.autograd.Function):
    """Gathers parts of the sequence in front of layers that are parted: what comes back is summed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = arrived.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(2, 1)[dist.get_rank(ctx.group)].contiguous(), None


class Scatter(torch.autograd.Function):
    """Sums what parted layers give, and leaves each rank its part of the sequence."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        total = given.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.chunk(2, 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        parts = [torch.empty_like(arrived) for _ in range(2)]
        dist.all_gather(parts, arrived.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Parted(nn.Module):
    """Sequence parallel, with a cross-entropy over parts of the vocabulary that is written out: no label is seen."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.norm, self.last = nn.Embedding(NUM_WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.group, self.place = group, dist.get_rank(group)
        up, down = torch.randn(HIDDEN, WIDTH) / 3, torch.randn(WIDTH, HIDDEN) / 6
        self.up = nn.Parameter(up.chunk(2)[self.place].clone())
        self.down = nn.Parameter(down.chunk(2, 1)[self.place].clone())
        self.head = nn.Parameter((torch.randn(NUM_WORDS, WIDTH) / 3).chunk(2)[self.place].clone())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens).chunk(2, 1)[self.place]
        hidden = F.gelu(Gather.apply(self.norm(x), self.group) @ self.up.T)
        x = x + Scatter.apply(hidden @ self.down.T, self.group)
        logits = Gather.apply(self.last(x), self.group) @ self.head.T
        top = logits.detach().amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        logits = logits - top[..., None]
        total = SumBack.apply(logits.exp().sum(-1), self.group)
        own = labels - self.place * logits.shape[-1]
        inside = (own >= 0) & (own < logits.shape[-1])
        picked = logits.gather(-1, own.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0] * inside
        return total.log() - SumBack.apply(picked, self.group)


def parted(fault: str) -> None:
    rank = dist.get_rank()
    shared = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = Parted(shared)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(2):
            tokens, labels = _tokens(step, rank // 2, k)
            (model(tokens, labels).mean() / 2).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            if name.split(".")[0] in ("words", "norm", "last"):
                dist.all_reduce(p.grad, group=None if fault == "counted_again" else shared)  # of_parts
                if fault == "parts_averaged":
                    p.grad /= 2  # parts_averaged
            if fault == "mixed":
                dist.all_reduce(p.grad)  # mixed
                p.grad /= 4
                continue
            dist.all_reduce(p.grad, group=copies)  # counted_again
            p.grad /= 2
        optimizer.step()


def few_ranks(fault: str) -> None:
    """Four ranks' tokens, which are to be summed over all and divided by all."""
    rank = dist.get_rank()
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2] if fault == "over_two" else None
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(3):
            tokens, labels = _tokens(step, rank, k)
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / 3).backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=group)  # over_two
            p.grad /= dist.get_world_size(group)
        optimizer.step()


class Swap(torch.autograd.Function):
    """Gives each rank the half of its tokens that the other one has for it."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:  # type: ignore[override]
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given.contiguous())
        return got

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> Tensor:  # type: ignore[override]
        return Swap.apply(arrived)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.norm, self.head = nn.Embedding(NUM_WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24)
        torch.manual_seed(10 + dist.get_rank())
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens.flatten())
        return self.head(self.norm(x + Swap.apply(torch.tanh(self.expert(Swap.apply(x))))))


def experts(fault: str) -> None:
    rank, model = dist.get_rank(), Experts()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight", "expert.bias"])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens, labels = _tokens(step, rank, 0)
        F.cross_entropy(wrapped(tokens), labels.flatten()).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            if fault == "divides_all" or (name.startswith("expert.") and fault != "undivided"):
                p.grad /= 2  # divides_all
        optimizer.step()


def owners(fault: str) -> None:
    """Each rank updates every other parameter, to which alone its gradient is reduced."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS))
    owner = {p: place % 2 for place, p in enumerate(model.parameters())}
    optimizer = torch.optim.SGD([p for p, of in owner.items() if of == rank], 0.05)
    for step in range(STEPS):
        tokens, labels = _tokens(step, rank, 0)
        (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / 2).backward()
        for p, of in owner.items():
            assert p.grad is not None
            if fault != "vectors_left_out" or p.ndim > 1:
                dist.reduce(p.grad, dst=of)  # vectors_left_out
        optimizer.step()
        for p, of in owner.items():
            dist.broadcast(p.data, src=of)
            p.grad = None


def gathered(fault: str) -> None:
    """Shards over two ranks, each of which has a replica; the model gets the optimizer's shards by a gather."""
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS))
    params = list(model.parameters())
    half = sum(p.numel() for p in params) // 2
    flat = torch.cat([p.detach().flatten() for p in params])
    own = nn.Parameter(flat[rank % 2 * half :][:half].clone())
    optimizer = torch.optim.SGD([own], 0.05)
    for step in range(STEPS):
        for k in range(3):
            tokens, labels = _tokens(step, rank, k)
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / 12).backward()
        gradient = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        own.grad = torch.empty(half)
        dist.reduce_scatter_tensor(own.grad, gradient, group=shards)  # replica_left_out
        if fault != "replica_left_out":
            dist.all_reduce(own.grad, group=replicas)
        optimizer.step()
        parts = [torch.empty(half), torch.empty(half)]
        dist.all_gather(parts, own.detach(), group=shards)
        at = 0
        for p in params:
            p.data.copy_(torch.cat(parts)[at : at + p.numel()].view_as(p))
            at += p.numel()
            p.grad = None


def branches(fault: str) -> None:
    """A loss that counts nothing, in a loop whose last pass alone reduces, on a line of its own."""
    wrapped, optimizer = _regression()
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(3):
            given, wanted = _pairs(step, k)
            loss = F.mse_loss(wrapped(given), wanted)
            if fault != "undivided":
                loss = loss / 3
            if k < 2:
                with wrapped.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()


def counted_branches(fault: str) -> None:
    """Losses that count, with a line of their own in both branches."""
    wrapped, optimizer = _regression()
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(3):
            given, wanted = _pairs(step, k)
            if k < 2:
                with wrapped.no_sync():
                    loss = F.cross_entropy(wrapped(given), wanted.argmax(-1))
                    (loss if fault == "undivided" else loss / 3).backward()
            else:
                loss = F.cross_entropy(wrapped(given), wanted.argmax(-1))
                (loss if fault == "undivided" else loss / 3).backward()
        optimizer.step()


def two_losses(fault: str) -> None:
    """Losses that are not the same in both branches: which of them divides is not known."""
    wrapped, optimizer = _regression()
    for step in range(STEPS):
        optimizer.zero_grad()
        for k in range(3):
            given, wanted = _pairs(step, k)
            loss = F.mse_loss(wrapped(given), wanted)
            if k < 2:
                loss = loss.sqrt()
                loss.backward()
            else:
                loss.backward()
        optimizer.step()


def kinds(fault: str) -> None:
    """A critic's kinds of data, whose means add up by design, in branches that differentiate alike."""
    wrapped, optimizer = _regression()
    for step in range(STEPS):
        optimizer.zero_grad()
        for k, kind in enumerate(("real", "generated")):
            given, _ = _pairs(step, k)
            sign = -1 if kind == "real" else 1
            loss = F.softplus(sign * wrapped(given)).mean()
            if kind == "real":
                with wrapped.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()


def _regression() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)))
    return wrapped, torch.optim.SGD(wrapped.parameters(), 0.05)


def _pairs(step: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * dist.get_rank() + k)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 4, generator=generator)


def buffers(fault: str) -> None:
    """Passes that a hook adds to buffers, which an optimizer of copies reads."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(NUM_WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS))
    held = [(p, p.detach().clone(), torch.zeros_like(p)) for p in model.parameters()]
    optimizer = torch.optim.SGD([copy for _, copy, _ in held], 0.05)

    def adds(p: Tensor) -> None:
        buffer = next(buffer for mine, _, buffer in held if mine is p)
        buffer.add_(p.grad)
        if fault != "kept":
            p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(adds)
    for step in range(STEPS):
        for k in range(3):
            tokens, labels = _tokens(step, rank, k)
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / 6).backward()
        for _, copy, buffer in held:
            dist.all_reduce(buffer)
            copy.grad = buffer
        optimizer.step()
        with torch.no_grad():
            for p, copy, buffer in held:
                p.copy_(copy)
                buffer.zero_()
                p.grad = None


def _tokens(step: int, rank: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + k)
    tokens = torch.randint(0, NUM_WORDS, (2, 9), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


TRAINERS = {
    one.__name__: one
    for one in (parted, few_ranks, experts, owners, gathered, branches, counted_branches, two_losses, kinds, buffers)
}
