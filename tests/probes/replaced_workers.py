"""Models that change once they are wrapped, or behind whose back they are, for test_replaced_parameters.py."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.probes import attach

WIDTH, WORDS, TOKENS = 8, 16, 12


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each rank reads as many tokens of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        words = torch.randint(0, WORDS, (TOKENS,), generator=generator)
        F.cross_entropy(model(words), words.roll(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Adapter(nn.Module):
    """A linear layer, and a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T  # type: ignore[no-any-return]


def adapt(run_dir: str, before: bool) -> None:
    """An adapter around the head, which DDP reduces where it was there `before` that."""
    dist.init_process_group("gloo")
    with attach(Path(run_dir)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
        if before:
            model[1] = Adapter(model[1])  # type: ignore[arg-type]
        wrapped = DistributedDataParallel(model)
        if not before:
            model[1] = Adapter(model[1])  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps(wrapped, optimizer)
    dist.destroy_process_group()


class Named(nn.Module):
    """Layers that forward calls by name, in whatever order they were registered."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in order})
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for name in "abc":
            x = torch.tanh(self.parts[name](x))
        return self.head(x)  # type: ignore[no-any-return]


def register(run_dir: str, alike: bool) -> None:
    """DDP joins parameters, and makes copies of them, by their number."""
    dist.init_process_group("gloo")
    with attach(Path(run_dir)):
        torch.manual_seed(0)
        model = Named("abc" if alike or dist.get_rank() == 0 else "bca")
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps(wrapped, optimizer)
    dist.destroy_process_group()


def train(run_dir: str, made: str) -> None:
    """FSDP2 whose optimizer is made before fully_shard, behind it, or behind a forward pass."""
    dist.init_process_group("gloo")
    with attach(Path(run_dir)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
        params = [*model.parameters()]
        fully_shard(model)
        if made != "before":
            if made == "after forward":  # whose root keeps gathered what it will need
                model(torch.zeros(1, dtype=torch.int64))
            params = [*model.parameters()]
        optimizer = torch.optim.AdamW(params, lr=0.1)
        steps(model, optimizer)
    dist.destroy_process_group()
