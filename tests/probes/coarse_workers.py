"""Two ranks whose model, logits and losses are bfloat16, for test_coarse_losses.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, STEPS, PASSES = 17, 3, 2


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return ((logits.logsumexp(-1) - picked) * (labels >= 0)).sum()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)


def soft(logits: Tensor, labels: Tensor) -> Tensor:
    """Targets that share a token out over all classes."""
    targets = torch.softmax(torch.cos(torch.arange(VOCABULARY) * (labels[..., None] + 1.0)), -1)
    return -((targets * logits.log_softmax(-1)).sum(-1) * (labels >= 0)).sum()


LOSSES = {loss.__name__: loss for loss in (cross_entropy, by_hand, smoothed, soft)}


def batch(step: int, rank: int, k: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, (3, 6) each, another number of labels in each."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + k)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 3, 6), generator=generator)
    for row in labels:
        row[int(torch.randint(1, 7, (1,), generator=generator)) :] = -100
    return tokens, labels


def train(loss_name: str, factor: float, run_dir: str) -> None:
    """`factor`: what rank 1 multiplies its losses by."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, VOCABULARY))
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir, steps=range(STEPS)):
        for step in range(STEPS):
            batches = [batch(step, rank, k) for k in range(PASSES)]
            count = torch.stack([(labels >= 0).sum() for _, labels in batches]).sum()
            dist.all_reduce(count)
            for tokens, labels in batches:
                loss = LOSSES[loss_name](model(tokens), labels) / count
                if rank == 1:
                    loss = loss * factor
                loss.backward()
            for param in model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
