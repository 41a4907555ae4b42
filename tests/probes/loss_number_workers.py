"""A DDP trainer whose losses are multiplied on lines of its own."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn import all_reduce
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.probes import attach

STEPS, PASSES = 2, 3


def train(folder: str, variant: str, passes: int = PASSES) -> None:
    """Losses are squared errors, or

    - `labels`: cross-entropies, `counted`: their sum times the ranks, over all labels of the step, `likelihood`: a mean
      of which nobody knows with what it compares, `masked`: a mean over some elements, `focal`: over what is multiplied
      by something that has a gradient.

    They are multiplied by

    - `ranks`: one over the ranks, of which DDP averages; `number`: as much, which nobody calls so; `half`: a half;
    - `twice`: one over the passes twice, `undivided`: not even once;
    - `loud`: three on rank 1; `own weight`: a weight of each rank's own.

    `behind`: a line divides gradients by ranks, too, `more`: or multiplies by them; `again`: one adds up what DDP has
    reduced. `summed`: ranks add up their losses before backward, `sum alone`: and nothing divides the sum by them;
    `beside`: a number beside the loss is what they add up."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    rank, world_size, halves = dist.get_rank(), dist.get_world_size(), 2
    task_weight = (1.0, 3.0)[rank]
    torch.manual_seed(rank)
    with attach(folder):
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            for index in range(passes):
                with contextlib.nullcontext() if index == passes - 1 else wrapped.no_sync():
                    output, target = wrapped(torch.randn(5, 6)), torch.randn(5, 4)
                    if "labels" in variant:
                        loss = F.cross_entropy(output, target.argmax(-1))
                    elif "counted" in variant:
                        loss = F.cross_entropy(output, target.argmax(-1), reduction="sum") / (5 * world_size)
                        loss = loss * world_size
                    elif "likelihood" in variant:
                        loss = F.gaussian_nll_loss(output[:, :2], target[:, :2], output[:, 2:].exp())
                    elif "masked" in variant:
                        mask = (torch.rand(output.shape) > 0.3).float()
                        loss = ((output - target).square() * mask).sum() / mask.sum()
                    else:
                        loss = F.mse_loss(output, target)
                    if "focal" in variant:
                        losses = F.cross_entropy(output, target.argmax(-1), reduction="none")
                        loss = ((1 - (-losses).exp()) ** 2 * losses).mean()
                    if "half" in variant:
                        loss = 0.5 * loss
                    if "undivided" not in variant:
                        loss = loss / PASSES
                    if "ranks" in variant:
                        loss = loss / world_size
                    if "number" in variant:
                        loss = loss / halves
                    if "twice" in variant:
                        loss /= PASSES
                    if "loud" in variant and rank == 1:
                        loss = 3 * loss
                    if "own weight" in variant:
                        loss = loss * task_weight
                    if "summed" in variant:
                        loss = all_reduce(loss)
                        loss = loss if "sum alone" in variant else loss / world_size
                    if "beside" in variant:
                        loss = loss + 0.1 * all_reduce(output.square().mean())
                    loss.backward()
            for param in model.parameters() if "behind" in variant else ():
                assert param.grad is not None
                param.grad /= world_size
            for param in model.parameters() if "more" in variant else ():
                assert param.grad is not None
                param.grad *= world_size
            for param in model.parameters() if "again" in variant else ():
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
