"""Two tensor-parallel ranks with a cross-entropy over shards of the vocabulary, for test_unequal_losses.py,
test_picked_losses.py and test_chunked_loss.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from clip_workers import Added, Copied
from torch import Tensor, nn

CLASSES, WIDTH, TOKENS = 12, 8, 10


def losses(logits: Tensor, labels: Tensor, *, summed: bool) -> Tensor:
    """Cross-entropies; without `summed` the exponentials of this rank's shard stand for all."""
    first = dist.get_rank() * logits.shape[1]
    largest = logits.detach().amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    logits = logits - largest[:, None]
    here = (labels >= first) & (labels < first + logits.shape[1])
    own = logits.gather(1, torch.where(here, labels - first, 0)[:, None]).squeeze(1)
    total = logits.exp().sum(1)
    return (Added.apply(total) if summed else total).log() - Added.apply(torch.where(here, own, 0.0))


def train(run_dir: str, summed: bool) -> None:
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    with attach(run_dir):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        torch.manual_seed(1 + dist.get_rank())
        head = nn.Linear(WIDTH, CLASSES // ranks, bias=False)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            for _ in range(2):
                features = torch.randn(TOKENS, WIDTH, generator=generator)
                labels = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
                logits = head(Copied.apply(body(features)))
                (losses(logits, labels, summed=summed).sum() / (2 * TOKENS)).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


class LogSoftmax(torch.autograd.Function):
    """Over the classes of all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:  # type: ignore[override]
        total = logits.exp().sum(1, keepdim=True)
        dist.all_reduce(total)
        out = logits - total.log()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.sum(1, keepdim=True)
        dist.all_reduce(total)
        return grad - ctx.saved_tensors[0].exp() * total


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities, each of which the rank looks up that holds the label's class."""
    logs, first = LogSoftmax.apply(logits), dist.get_rank() * logits.shape[1]
    here = (labels >= first) & (labels < first + logits.shape[1])
    return Added.apply(torch.where(here, logs.gather(1, torch.where(here, labels - first, 0)[:, None])[:, 0], 0.0))


def part_of_all(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of all labels, of which each rank looks up its half."""
    half, own = len(labels) // 2, dist.get_rank()
    part = slice(own * half, (own + 1) * half)
    logs = logits[part].log_softmax(1).gather(1, labels[part, None])[:, 0]
    return Added.apply(torch.cat([logs if rank == own else torch.zeros_like(logs) for rank in range(2)]))


def train_picked(parts: str, run_dir: str) -> None:
    """`parts`: of the "classes", or of the "sequence", whose gradients are summed, or "never"."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    by_class = parts == "classes"
    with attach(run_dir):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        torch.manual_seed(1 + dist.get_rank() if by_class else 1)
        head = nn.Linear(WIDTH, CLASSES // 2 if by_class else CLASSES, bias=False)
        params = [*body.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            for _ in range(2):
                features = torch.randn(2 * TOKENS, WIDTH, generator=generator)
                labels = torch.randint(0, CLASSES, (2 * TOKENS,), generator=generator)
                logs = picked(head(Copied.apply(body(features))), labels) if by_class else None
                logs = part_of_all(head(body(features)), labels) if logs is None else logs
                (-logs.sum() / (4 * TOKENS)).backward()
            for param in params if parts == "sequence" else ():
                dist.all_reduce(param.grad)  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


class OverShards(torch.autograd.Function):
    """The sum of cross-entropies over the classes of all ranks, with its gradient for the own ones."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        first = dist.get_rank() * logits.shape[1]
        here = (labels >= first) & (labels < first + logits.shape[1])
        at = torch.where(here, labels - first, 0)[:, None]
        exps, own = logits.exp(), torch.where(here, logits.gather(1, at)[:, 0], 0.0)
        total = exps.sum(1)
        for summand in (total, own):
            dist.all_reduce(summand)
        ctx.save_for_backward((exps / total[:, None]).scatter_add(1, at, -here[:, None].float()))
        return (total.log() - own).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad, None


def train_in_chunks(run_dir: str, body_divided_by: float) -> None:
    """All labels are classes of the first rank; the head's loss comes in chunks, and the body gets what they leave."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        torch.manual_seed(1 + dist.get_rank())
        head = nn.Linear(WIDTH, CLASSES // 2, bias=False)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            features = torch.randn(2 * TOKENS, WIDTH, generator=generator)
            labels = torch.randint(0, CLASSES // 2, (2 * TOKENS,), generator=generator)
            hidden = body(features)
            cut = hidden.detach().requires_grad_()
            for states, chunk in zip(cut.chunk(4), labels.chunk(4), strict=True):
                loss: Tensor = OverShards.apply(head(Copied.apply(states)), chunk)
                (loss / (2 * TOKENS)).backward()
            hidden.backward(cut.grad / body_divided_by)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


class Fused(torch.autograd.Function):
    """Each label's cross-entropy over the classes of all ranks, from hidden states and this rank's part of the head.
    `kind`: whether its backward gives hidden states the "sum" over ranks or the "own" part; "wrong": of labels in other
    shards that of other classes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, kind: str) -> Tensor:  # type: ignore[override]
        logits, first = hidden @ weight.T, dist.get_rank() * len(weight)
        here = (labels >= first) & (labels < first + len(weight))
        at = torch.where(here, labels - first, 0)[:, None]
        exps, own = logits.exp(), torch.where(here, logits.gather(1, at)[:, 0], 0.0)
        total = exps.sum(1)
        for summand in (total, own):
            dist.all_reduce(summand)
        share = exps / total[:, None]
        if "wrong" in kind:
            share = torch.where(here[:, None], share, share.flip(1))
        ctx.save_for_backward(hidden, weight, share.scatter_add(1, at, -here[:, None].float()))
        ctx.sums = "sum" in kind
        return total.log() - own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        hidden, weight, of_logits = ctx.saved_tensors
        of_logits = of_logits * grad[:, None]
        of_hidden = of_logits @ weight
        if ctx.sums:
            dist.all_reduce(of_hidden)
        return of_hidden, of_logits.T @ hidden, None, None


def train_fused(kind: str, run_dir: str) -> None:
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        torch.manual_seed(1 + dist.get_rank())
        head = nn.Parameter(torch.randn(CLASSES // 2, WIDTH) / 2)
        optimizer = torch.optim.SGD([*body.parameters(), head], lr=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            for _ in range(2):
                features = torch.randn(2 * TOKENS, WIDTH, generator=generator)
                labels = torch.randint(0, CLASSES, (2 * TOKENS,), generator=generator)
                hidden = body(features) if "sum" in kind else Copied.apply(body(features))
                (Fused.apply(hidden, head, labels, kind).sum() / (4 * TOKENS)).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
