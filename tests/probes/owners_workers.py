"""Parameters that one rank each updates by hand and sends to the others, for test_owners.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = (5, 3)
"""Tokens of each rank."""


def train(run_dir: str, how: str, alone: bool, sends: str = "broadcast") -> None:
    """Train some steps.

    Args:
        how: "", "summed" (the losses are sums over ranks of what should be their mean, x 2), or "divided" (the same,
            and owners divide the sum).
        alone: Whether rank 0 has all parameters.
        sends: how parameters come to the other ranks: by "broadcast", in a "flat" copy, by a "gather", as an "object",
            "never" (every rank steps with the gradient that it has), or the training "ends" before it sends any.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5, bias=False))
    params = list(model.parameters())
    owner = [0 if alone else index % world for index in range(len(params))]
    torch.manual_seed(1 + rank)
    with attach(run_dir, steps=range(3), objective="global-token-mean"):
        for _ in range(3):
            rows, labels = torch.randn(SIZES[rank], 8), torch.randint(0, 5, (SIZES[rank],))
            num_tokens = sum(SIZES) / (world if how else 1)
            (F.cross_entropy(model(rows), labels, reduction="sum") / num_tokens).backward()
            for at, param in zip(owner, params, strict=True):
                dist.reduce(grad(param), at)
            with torch.no_grad():
                for at, param in zip(owner, params, strict=True):
                    if at == rank and how == "divided":
                        grad(param).div_(world)
                    if at == rank or sends == "never":
                        param -= 0.1 * grad(param)
                if sends == "ends":
                    return
                for at in sorted(set(owner)):
                    send(sends, [param for one, param in zip(owner, params, strict=True) if one == at], at)
            for param in params:
                param.grad = None


def send(how: str, params: list[Tensor], owner: int) -> None:
    """Make parameters what their owner holds."""
    if how == "flat":
        flat = torch.cat([param.flatten() for param in params])
        dist.broadcast(flat, owner)
        for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.copy_(part.view_as(param))
    elif how == "object":
        held = [[param.data for param in params]]
        dist.broadcast_object_list(held, owner)
        for param, came in zip(params, held[0], strict=True):
            param.copy_(came)
    else:
        for param in params:
            everyone = [torch.empty_like(param) for _ in range(dist.get_world_size())]
            if how == "gather":
                dist.all_gather(everyone, param.data)
                param.copy_(everyone[owner])
            elif how == "broadcast":
                dist.broadcast(param.data, owner)


def grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
