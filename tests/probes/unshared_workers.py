"""Tensor parallelism of torch's, whose two ranks read a batch each, for test_unshared_batches.py."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradcheck_dist.probes import attach

WIDTH, WORDS, TOKENS = 8, 16, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def batch(reader: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + reader)
    words = torch.randint(0, WORDS, (2, TOKENS), generator=generator)
    words[1, int(torch.randint(4, TOKENS, (), generator=generator)) :] = -100
    return words[0], words[1]


def train(run_dir: str, shared: bool, counted: str) -> None:
    """`counted`: each rank's own tokens, or all ranks' (which a loss of unlike batches makes sense of)."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Layer(), nn.Linear(WIDTH, WORDS))
    parallelize_module(model, mesh, {"1.up": ColwiseParallel(), "1.down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with attach(Path(run_dir)):
        for step in range(2):
            words, labels = batch(0 if shared else dist.get_rank(), step)
            tokens = (labels >= 0).sum().float()
            if counted == "all":
                dist.all_reduce(tokens)
                tokens /= 2 if shared else 1
            (F.cross_entropy(model(words), labels, reduction="sum") / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
