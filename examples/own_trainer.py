"""A trainer of one's own, with one line of gradcheck in it.

    torchrun --nproc-per-node 2 examples/own_trainer.py runs/mine
    gradcheck diagnose runs/mine

It holds a real mistake: the loss is divided by the tokens of all ranks, and DDP averages over the ranks once more.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcheck_dist

VOCAB, WIDTH, ACCUMULATION_STEPS = 50, 32, 2


def batch(rank: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and next tokens; later ones are padding, more of it on some ranks than on others."""
    tokens = torch.randint(VOCAB, (4, 17), generator=torch.Generator().manual_seed(10 * rank + k))
    labels = tokens[:, 1:].clone()
    labels[:, 16 - 3 * rank - k :] = -100
    return tokens[:, :-1], labels


def main(run_dir: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    gradcheck_dist.attach(run_dir, objective="global-token-mean")

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = [batch(rank, k) for k in range(ACCUMULATION_STEPS)]
    num_tokens = torch.tensor(sum(int((labels != -100).sum()) for _, labels in batches))
    dist.all_reduce(num_tokens)
    for tokens, labels in batches[:-1]:
        with model.no_sync():
            backward(model, tokens, labels, num_tokens)
    backward(model, *batches[-1], num_tokens)
    optimizer.step()

    dist.barrier()
    dist.destroy_process_group()


def backward(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, num_tokens: torch.Tensor) -> None:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (loss / num_tokens).backward()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/mine")
