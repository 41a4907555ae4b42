"""Trainers of two ranks that differentiate one forward pass several times."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gradcheck_dist.probes import attach

SIZE = 6


def train(run_dir: str, variant: str) -> None:
    """`variant`: "tasks", "fisher" or "lost" (of two passes, the first), and what its gradients are, "averaged",
    "summed" or "alone"."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 6)])
    params = [*body.parameters(), *heads.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.05)
    torch.manual_seed(1 + dist.get_rank())
    with attach(run_dir):
        for step in range(3):
            hidden = torch.tanh(body(torch.randn(SIZE, 8)))
            labels = torch.randint(0, 4, (SIZE,))
            if "fisher" in variant and step == 2:
                for sample in F.cross_entropy(heads[0](hidden), labels, reduction="none"):
                    torch.autograd.grad(sample, list(body.parameters()), retain_graph=True)
            F.cross_entropy(heads[0](hidden), labels).backward(retain_graph=True)
            if "lost" in variant:
                for param in params:
                    param.grad = None
                hidden, labels = torch.tanh(body(torch.randn(SIZE, 8))), torch.randint(0, 4, (SIZE,))
                F.cross_entropy(heads[0](hidden), labels).backward(retain_graph=True)
            if "tasks" in variant:
                F.cross_entropy(heads[1](hidden), labels).backward()
            for param in params if "alone" not in variant else ():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= 1 if "summed" in variant else dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
