"""What two ranks run: losses over the features of all ranks, and collectives that no loss needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from verify_models import VOCAB, WIDTH, batch

from gradcheck_dist.trainer.contrastive import _Gather

Gather = Callable[[Tensor], Tensor]


def put_back(features: Tensor) -> Tensor:
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.contiguous())
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def detached(features: Tensor) -> Tensor:
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach().contiguous())
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def constant(features: Tensor) -> Tensor:
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.contiguous())
    return torch.cat(parts)


class Contrast(nn.Module):
    """InfoNCE of the own rows or of all, against the columns of all ranks."""

    def __init__(self, gather: Gather, all_rows: bool) -> None:
        super().__init__()
        self.gather, self.all_rows = gather, all_rows

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        columns = self.gather(other)
        rows = self.gather(one) if self.all_rows else one
        first = 0 if self.all_rows else dist.get_rank() * len(one)
        return F.cross_entropy(5 * rows @ columns.t(), torch.arange(first, first + len(rows)))


class Assignments(nn.Module):
    """SwAV: what is to be predicted is computed over all ranks, below no_grad."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            target = torch.exp(other)
            total = target.sum(0)
            dist.all_reduce(total)
            target = target / total
        return -(target * F.log_softmax(5 * one, -1)).sum(-1).mean()


class Metric(nn.Module):
    """Its loss is its own rank's; other ranks' numbers are for the log."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        count = torch.tensor(float(len(one)))
        dist.all_reduce(count)
        loss = (one - other.flip(0)).square().sum() / count
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        self.shown = float(shown)
        self.features = put_back(one).detach()
        return loss


class Pair(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner, self.loss = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), loss

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        one, other = (F.normalize(self.inner(self.embedding(part).mean(1)), dim=-1) for part in (tokens, labels))
        return self.loss(one, other)


class Features(nn.Module):
    """The same without its loss, which is computed outside."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(nn.Identity())
        self.pair.loss = Both()

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.pair(tokens, labels)


class Both(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return one, other


OUTSIDE: dict[str, nn.Module] = {
    "outside, gathered with a gradient": Contrast(_Gather.apply, False),
    "outside, all rows": Contrast(put_back, True),
    "outside, own put back": Contrast(put_back, False),
    "outside, assignments": Assignments(),
}
CASES: dict[str, Callable[[], nn.Module]] = {
    "gathered with a gradient, own rows": lambda: Contrast(_Gather.apply, False),
    "gathered with a gradient, all rows": lambda: Contrast(_Gather.apply, True),
    "own put back, all rows": lambda: Contrast(put_back, True),
    "own put back, own rows": lambda: Contrast(put_back, False),
    "detached, own put back, own rows": lambda: Contrast(detached, False),
    "all constant, own rows": lambda: Contrast(constant, False),
    "assignments below no_grad": Assignments,
    "a metric": Metric,
}


def train_all(folder: str) -> None:
    """One step of each case, each in a run folder of its name."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    for name, loss in CASES.items():
        model = DistributedDataParallel(Pair(loss()))
        with attach(Path(folder) / name, verify=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(*batch(0, dist.get_rank())).backward()
            optimizer.step()
    for name, loss in OUTSIDE.items():
        model = DistributedDataParallel(Features())
        with attach(Path(folder) / name, verify=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss.forward(*model(*batch(0, dist.get_rank()))).backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
