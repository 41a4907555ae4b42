"""Ranks that reduce gradients by hand while torch's default device is set, for test_default_device.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch

from gradcheck_dist.probes import attach


def train(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_default_device("cpu")
    try:
        with attach(folder):
            for step in range(2):
                tokens, labels = batch(dist.get_rank(), step)
                F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum").backward()
                count = (labels >= 0).sum()
                dist.all_reduce(count)
                grads = [param.grad for param in model.parameters() if param.grad is not None]
                flat = torch.cat([grad.flatten() for grad in grads[:2]])
                dist.all_reduce(flat)
                for grad, part in zip(grads[:2], flat.split([grad.numel() for grad in grads[:2]]), strict=True):
                    grad.copy_(part.view_as(grad))
                for grad in grads[2:]:
                    dist.all_reduce(grad)
                for grad in grads:
                    grad.div_(count)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_default_device(None)
    dist.destroy_process_group()
