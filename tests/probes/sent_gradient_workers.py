"""Two ranks of which one sends its gradients to the other, with or without adding the other's first."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gradcheck_dist.probes import attach

STEPS = 2


def train(folder: str, variant: str) -> None:
    """`reduced`: rank 0 adds up all gradients before it sends them, so that all is right."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    with attach(folder):
        for _ in range(STEPS):
            num_tokens = torch.tensor(4.0 + dist.get_rank())
            inputs, labels = torch.randn(int(num_tokens), 6), torch.randint(0, 5, (int(num_tokens),))
            dist.all_reduce(num_tokens)
            (F.cross_entropy(model(inputs), labels, reduction="sum") / num_tokens).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if variant == "reduced":
                    dist.reduce(parameter.grad, 0)
                dist.broadcast(parameter.grad, 0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
