"""What ranks of the probe tests run: the trainer, with and without probes, and small loops of a user's kind.

No postponed annotations here: DDP looks at those of a communication hook.
"""

import contextlib
import zlib
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.result import TrainResult


def train_recorded(config: TrainConfig, run_dir: str | None) -> TrainResult:
    """The project's trainer; recorded when a run folder is given."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    if run_dir is None:
        return train(config)
    with attach(run_dir, objective="global-token-mean", axes=config.axes):
        return train(config)


def record_each(
    folder: str,
    variants: Iterable[str],
    train: Callable[[str], None],
    *,
    steps_of: Callable[[str], Container[int] | None] = lambda _: None,
    **options: Any,
) -> None:
    """Train every variant, each recorded into a folder of its own."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    for variant in variants:
        with attach(Path(folder) / variant, **{"steps": steps_of(variant), **options}):
            train(variant)
            dist.barrier()
    dist.destroy_process_group()


class Net(nn.Module):
    """Embedding, two layers, head: 20 tokens, 16 features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


def batch(rank: int, k: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels, shape (2, 12); the number of valid labels depends on rank and k."""
    generator = torch.Generator().manual_seed(1000 * rank + k)
    tokens = torch.randint(0, 20, (2, 12), generator=generator)
    labels = torch.randint(0, 20, (2, 12), generator=generator)
    labels[:, 4 + 2 * rank + 2 * k :] = -100
    return tokens, labels


def token_sum(model: Callable[[Tensor], Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
    tokens, labels = data
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")


def sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def user_loop(variant: str, run_dir: str | None) -> int:
    """A hand-written DDP loop of two accumulation steps; returns a checksum of the parameters.

    Variants: "sum-hook" (correct), "manual" (no DDP hook: correct, all-reduced by hand), "inverted" (no_sync on the
    last instead of the others), "unrecorded" (correct, then .grad *= 0.5 by hand before the optimizer).
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir, objective="global-token-mean") if run_dir else contextlib.nullcontext():
        model = Net()
        ddp: Any = model if variant == "manual" else DistributedDataParallel(model)
        if variant != "manual":
            ddp.register_comm_hook(None, sum_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [batch(rank, k) for k in range(2)]
        total = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
        dist.all_reduce(total)
        for k, part in enumerate(data):
            quiet = variant != "manual" and ((k == 0) != (variant == "inverted"))
            with ddp.no_sync() if quiet else contextlib.nullcontext():
                (token_sum(ddp, part) / total).backward()
        if variant == "manual":
            for param in model.parameters():
                dist.all_reduce(param.grad)
        if variant == "unrecorded":
            for param in model.parameters():
                param.grad.mul_(0.5)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    assert world == 2
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def with_and_without(
    train: Callable[[str], int], variants: Iterable[str], folder: str, steps: Container[int] | None = None
) -> list[tuple[int, int]]:
    """What `train` returns for each variant, without probes and recorded into folder/variant."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    found = []
    for variant in variants:
        checksums = []
        for recorded in (False, True):
            with attach(Path(folder) / variant, steps=steps) if recorded else contextlib.nullcontext():
                checksums.append(train(variant))
                dist.barrier()
        found.append((checksums[0], checksums[1]))
    dist.destroy_process_group()
    return found
