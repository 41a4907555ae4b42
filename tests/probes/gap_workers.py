"""Two ranks below DDP of which every other step is recorded."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, record_each
from torch.nn.parallel import DistributedDataParallel

VARIANTS = ("reduced", "not reduced in between", "not reduced in between once", "not reduced in step 2")
STEPS = 5


def run(folder: str) -> None:
    record_each(folder, VARIANTS, train, steps=[0, 2, 4])


def train(variant: str) -> None:
    torch.manual_seed(0)
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    alone = {
        "reduced": (),
        "not reduced in between": (1, 3),
        "not reduced in between once": (1,),
        "not reduced in step 2": (2,),
    }[variant]
    for step in range(STEPS):
        tokens, labels = batch(dist.get_rank(), step)
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        with net.no_sync() if step in alone else nullcontext():
            loss = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
