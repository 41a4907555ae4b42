"""Trainers of two axes of as many ranks, in which one of the two is what goes wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from gradcheck_dist.probes import attach

STEPS, WIDTH, CLASSES = 2, 6, 9


def train(folder: str, variant: str) -> None:
    """Ranks in pairs that evaluate one batch (as of tensor parallelism), below an average over data ranks that the loss
    makes up for. `again`: what each pair holds whole is summed over it for the norm. `context`: each rank of a pair has
    tokens of its own, and they are summed; `averaged`: and divided by two; `counted`: losses are sums, and a line
    divides by the tokens of each pair behind what sums all ranks'; `left out`: the norm is not summed, and the loss
    does not make up for the average. `alone`, `experts`: without the wrapper, sums over all ranks, of all but the norm
    or but the head, which is another one on each of a pair; `alone`: and over one rank. `empty`: tokens are counted
    over data ranks alone, and one rank has none in the first step, another in the second. `doubled`: sums over data
    ranks of halved losses, of which a line doubles the head's."""
    dist.init_process_group("gloo")
    has_own = variant in ("context", "averaged", "counted", "left out", "alone", "experts", "empty")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp" if has_own else "tp"))
    dp, pair = mesh["dp"], mesh["cp" if has_own else "tp"]
    place = dist.get_rank() if has_own else dp.get_local_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    generator = torch.Generator().manual_seed(place)
    by_hand = {"alone": "1.", "experts": "2.", "doubled": "none"}.get(variant)
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    if variant == "experts":
        torch.manual_seed(1 + pair.get_local_rank())
        model[2].reset_parameters()
    with attach(folder):
        wrapped = model if by_hand else DistributedDataParallel(model, process_group=dp.get_group())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            inputs = torch.randn(4 + place, WIDTH, generator=generator)
            labels = torch.randint(CLASSES, (len(inputs),), generator=generator)
            if variant == "empty" and place == 1 + 2 * step:
                labels[:] = -100
            tokens = torch.tensor(float((labels >= 0).sum()))
            dist.all_reduce(tokens, group=None if has_own and variant != "empty" else dp.get_group())
            loss = F.cross_entropy(wrapped(inputs), labels, reduction="sum")
            loss = loss if variant == "counted" else loss / tokens
            loss = loss if variant == "left out" or by_hand else loss * dp.size()
            loss = loss / 2 if variant == "doubled" else loss
            loss.backward()  # left out
            for param in model[1].parameters() if variant == "again" else ():
                assert param.grad is not None
                dist.all_reduce(param.grad, group=pair.get_group())  # again
            for name, param in model.named_parameters() if by_hand else ():
                assert param.grad is not None
                if not name.startswith(by_hand or ""):
                    dist.all_reduce(param.grad, group=None if has_own else dp.get_group())  # of the others
                if variant == "alone":
                    dist.all_reduce(param.grad, group=own)
                if variant == "doubled" and name.startswith("2."):
                    param.grad *= 2  # doubled
            for name, param in model.named_parameters() if has_own and not by_hand else ():
                assert param.grad is not None
                if variant == "left out" and name.startswith("1."):
                    continue
                dist.all_reduce(param.grad, group=pair.get_group())
                if variant == "averaged":
                    param.grad /= 2  # averaged
            if variant == "counted":
                tokens = torch.tensor(float(len(inputs)))
                dist.all_reduce(tokens, group=pair.get_group())
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad /= tokens  # counted
            optimizer.step()
            optimizer.zero_grad()
