"""Four ranks below DDP with two faults at once, for test_pairs_of_faults.py."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, sum_hook
from torch.nn.parallel import DistributedDataParallel

PASSES = 2


def train(faults: tuple[str, ...], run_dir: str) -> None:
    """One step of two passes over sums that are divided by the average tokens of a rank.

    Args:
        faults: "group" reduces over pairs of ranks, "never" reduces nothing, "means" divides each pass by its own
            tokens and nothing else, "padded" counts more tokens than enter the losses, "padded by half" far more,
            "scaled" multiplies the gradient of the head by a third, "undone average" leaves the ranks out of losses,
            "summed" adds up instead, "counted twice" counts each token twice, "times ranks" undoes the average by hand.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    with attach(run_dir):
        model = DistributedDataParallel(Net(), process_group=pairs[rank // 2] if "group" in faults else None)
        if "summed" in faults:
            model.register_comm_hook(None, sum_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = [(batch(0, k)[0], batch(other, k)[1]) for other in range(ranks) for k in range(PASSES)]
        counts = [int((labels >= 0).sum()) for _, labels in data]
        total = sum(counts) + (5 if "padded" in faults else 64 if "padded by half" in faults else 0)
        share = total if {"undone average", "times ranks"} & set(faults) else total / ranks
        share *= 2 if "counted twice" in faults else 1
        for k in range(PASSES):
            tokens, labels = data[rank * PASSES + k]
            apart = k < PASSES - 1 or "never" in faults
            with model.no_sync() if apart else contextlib.nullcontext():
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
                (loss / (counts[rank * PASSES + k] if "means" in faults else share)).backward()
        if "scaled" in faults:
            model.module.head.weight.grad /= 3
        for param in model.parameters() if "times ranks" in faults else ():
            param.grad.mul_(ranks)  # type: ignore[union-attr]
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
