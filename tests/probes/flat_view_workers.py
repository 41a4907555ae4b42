"""Two ranks whose gradients are views of one flat buffer, which is unscaled and summed by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from gradcheck_dist.probes import attach

STEPS, SCALE = 3, 1024.0


def train(folder: str, variant: str) -> None:
    """`some`: the loss scale is taken out of the first layer's gradients alone."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    num_first = sum(param.numel() for param in model[0].parameters())
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = part.view_as(param)
    torch.manual_seed(1 + dist.get_rank())
    with attach(folder):
        for _ in range(STEPS):
            flat.zero_()
            num_tokens = torch.tensor(4.0 + dist.get_rank())
            inputs, labels = torch.randn(int(num_tokens), 6), torch.randint(0, 5, (int(num_tokens),))
            dist.all_reduce(num_tokens)
            (F.cross_entropy(model(inputs), labels, reduction="sum") / num_tokens * SCALE).backward()
            if variant == "some":
                flat[:num_first] /= SCALE
            dist.all_reduce(flat)
            if variant == "all":
                flat /= SCALE
            optimizer.step()
