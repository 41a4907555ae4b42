"""Parameters that one rank each updates by hand and broadcasts, for test_owners.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (5, 3)
"""Tokens of each rank."""


def train(run_dir: str, how: str, alone: bool) -> None:
    """Train some steps.

    Args:
        how: "" or "summed" (the losses are sums over ranks of what should be their mean, x 2).
        alone: Whether rank 0 has all parameters.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))
    params = list(model.parameters())
    owner = [0 if alone else index % world for index in range(len(params))]
    torch.manual_seed(1 + rank)
    with attach(run_dir, steps=range(3), objective="global-token-mean"):
        for _ in range(3):
            rows, labels = torch.randn(SIZES[rank], 8), torch.randint(0, 5, (SIZES[rank],))
            num_tokens = sum(SIZES) / (world if how == "summed" else 1)
            (F.cross_entropy(model(rows), labels, reduction="sum") / num_tokens).backward()
            for at, param in zip(owner, params, strict=True):
                dist.reduce(grad(param), at)
            with torch.no_grad():
                for at, param in zip(owner, params, strict=True):
                    if at == rank:
                        param -= 0.1 * grad(param)
            for at, param in zip(owner, params, strict=True):
                dist.broadcast(param.data, at)
                param.grad = None


def grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
