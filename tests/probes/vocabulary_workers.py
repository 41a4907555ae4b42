"""Two tensor-parallel ranks with a cross-entropy over shards of the vocabulary, for test_unequal_losses.py."""

from __future__ import annotations

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
