"""Two ranks below DDP whose communication hooks average or add up, by an all-reduce or by messages to each rank."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, record_each
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

VARIANTS = ("reduces and divides", "reduces", "exchanges and divides", "exchanges")
STEPS = 2


def run(folder: str) -> None:
    record_each(folder, VARIANTS, train)


def train(variant: str) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(Net())

    def hook(_: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        total = exchanged(bucket.buffer()) if variant.startswith("exchanges") else reduced(bucket.buffer())
        done: Future[Tensor] = Future()
        done.set_result(total / (dist.get_world_size() if "divides" in variant else 1))
        return done

    net.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        data = [batch(dist.get_rank(), 3 * step + k) for k in range(3)]
        count = torch.stack([(labels >= 0).sum() for _, labels in data]).sum()
        dist.all_reduce(count)
        for index, (tokens, labels) in enumerate(data):
            net.require_backward_grad_sync = index == 2
            loss = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def reduced(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total


def exchanged(values: Tensor) -> Tensor:
    """Each rank adds up a part, and all gather the parts."""
    size = dist.get_world_size()
    sent = F.pad(values, (0, -len(values) % size))
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent)
    total = torch.empty_like(sent)
    dist.all_gather_into_tensor(total, found.view(size, -1).sum(0))
    return total[: len(values)]
