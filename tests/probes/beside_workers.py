"""Two or more ranks of DDP whose loss over tokens has another one beside it, for test_beside.py."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PASSES = 2
Loss = Callable[[Tensor, Tensor, int, int], Tensor]
"""Of logits, labels, the tokens of all ranks in the step, and the ranks."""


class Unread(Tensor):
    """As a DTensor is: its number costs more than a look."""

    def __float__(self) -> float:
        raise AssertionError("a probe read it")


def token_sum(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, reduction="sum")


LOSSES: dict[str, Loss] = {
    "right": lambda x, y, n, world: token_sum(x, y) / n * world,
    "a coefficient": lambda x, y, n, world: token_sum(x, y) * world / n / world,
    "a coefficient before the mean": lambda x, y, n, world: F.cross_entropy(x, y) / world / PASSES,
    "alone, its own count": lambda x, y, n, world: (
        (token_sum(x, y) * world / torch.tensor(float(len(y))) + F.cross_entropy(x[:5], y[:5].flip(0))) / PASSES
    ),
    "alone, twice a mean": lambda x, y, n, world: (
        (2.0 * F.cross_entropy(x, y) + F.cross_entropy(x[:5], y[:5].flip(0))) / PASSES
    ),
    "divided": lambda x, y, n, world: token_sum(x, y) / n,
    "divided, times one": lambda x, y, n, world: 1.0 * token_sum(x, y) / torch.tensor(float(n)),
    "divided, masked": lambda x, y, n, world: (
        (F.cross_entropy(x, y, reduction="none") * (y >= 0)).sum() / torch.tensor(float(n))
    ),
    "divided, unread": lambda x, y, n, world: token_sum(x, y) / torch.tensor(float(n)).as_subclass(Unread),
    "divided, as a mean": lambda x, y, n, world: F.cross_entropy(x, y) * len(y) / n,
    "divided, as a share": lambda x, y, n, world: F.cross_entropy(x, y) * (len(y) / n),
}


def train(name: str, sizes: list[int], run_dir: str) -> None:
    """One step; each rank's batches have its own of the `sizes`."""
    from gradcheck_dist.probes import attach

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    with attach(run_dir):
        model = DistributedDataParallel(body)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1 + rank)
        for k in range(PASSES):
            model.require_backward_grad_sync = k == PASSES - 1
            x = model(torch.randn(sizes[rank], 6))
            labels = torch.randint(5, (sizes[rank],))
            penalty = 0.01 * (x - torch.ones_like(x).cumsum(1)).abs().mean()
            loss = LOSSES[name](x, labels, PASSES * sum(sizes), world)
            (loss if name.startswith("alone") else loss + penalty).backward()
        optimizer.step()


def train_all(names: list[str], sizes: list[int], folder: str) -> None:
    dist.init_process_group("gloo")
    for name in names:
        train(name, sizes, f"{folder}/{name.replace(' ', '_')}")
    dist.barrier()
    dist.destroy_process_group()
