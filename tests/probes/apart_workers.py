"""Ranks that reduce no gradients, for test_training_apart.py."""

import contextlib
import copy
import zlib

import torch
import torch.distributed as dist
from probe_workers import Net, batch, token_sum

STEPS, RECORDED = 6, 3


def train(
    how: str,
    every: int,
    factor: float,
    run_dir: str | None,
    of_all: bool = False,
    empties: bool = True,
    equal: bool = False,
    by_pass: bool = False,
    own_seed: bool = False,
    warm: int = 0,
) -> int:
    """Train some steps; returns a checksum of the parameters.

    Args:
        how: "parameters", "pseudo gradients" (DiLoCo), "neighbour" (gossip), "elastic" (towards a common
            point), "pickled" (parameters, as objects), "never", "decay" (by hand; ranks tell one another a number),
            "logged" (a decay and what ranks log, as objects), "by itself" (a decay, and each rank reduces its
            parameters over itself alone), or "owner": each rank steps parameters of its own and
            hands them to the others (ZeRO without its reduction).
        every: steps between two averages.
        of_all: losses are divided by the mean over ranks of their tokens.
        empties: gradients are emptied behind each step.
        equal: two ranks have equally many tokens.
        by_pass: losses are means over their own tokens, divided by the number of passes.
        own_seed: each rank draws a model of its own.
        warm: the first steps, in which gradients are averaged.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir, steps=range(RECORDED)) if run_dir else contextlib.nullcontext():
        model = Net()
        for one in model.parameters() if own_seed else ():
            torch.nn.init.normal_(one, std=0.1, generator=torch.Generator().manual_seed(one.numel() + rank))
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params[rank::world] if how == "owner" else params, lr=0.05)
        start = [param.detach().clone() for param in model.parameters()]
        passes = [range(1 - one, 3 - one) if equal else range(2) for one in range(world)]
        counts = [sum(int((batch(one, k)[1] >= 0).sum()) for k in passes[one]) for one in range(world)]
        num_tokens = sum(counts) / world if of_all else counts[rank]
        itself = [dist.new_group([one]) for one in range(world)][rank]
        for step in range(STEPS):
            for k in passes[rank]:
                divisor = 2 * int((batch(rank, k)[1] >= 0).sum()) if by_pass else num_tokens
                (factor * token_sum(model, batch(rank, k)) / divisor).backward()
            for param in params if step < warm else ():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= world
            optimizer.step()
            if empties:
                model.zero_grad()
            if how != "never" and (step + 1) % every == 0:
                average(how, list(model.parameters()), start, rank, world, itself)
    dist.barrier()
    dist.destroy_process_group()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


@torch.no_grad()
def average(
    how: str,
    params: list[torch.Tensor],
    start: list[torch.Tensor],
    rank: int,
    world: int,
    itself: dist.ProcessGroup | None = None,
) -> None:
    for index, (param, first) in enumerate(zip(params, start, strict=True)):
        if how == "owner":
            dist.broadcast(param.data, index % world)
        elif how == "decay":
            param.mul_(0.99)
            dist.all_reduce(torch.zeros(()))
        elif how == "by itself":
            param.mul_(0.99)
            dist.all_reduce(param.data, group=itself)
        elif how == "logged":
            param.mul_(0.99)
            if not index:
                logs: list[dict[str, float] | None] = [None] * world
                dist.all_gather_object(logs, {f"loss/of step {one}": 0.5 * one for one in range(4)})
        elif how == "pickled":
            everyone: list[torch.Tensor] = [param] * world
            dist.all_gather_object(everyone, param.clone())
            param.copy_(torch.stack(everyone).mean(dim=0))
        elif how == "elastic":
            pull = 0.2 * (param - first)
            param.sub_(pull)
            dist.all_reduce(pull)
            first.add_(pull)
        elif how == "neighbour":
            held = [torch.zeros_like(param) for _ in range(world)]
            dist.all_gather(held, param.detach())
            param.mul_(0.75).add_(held[(rank + 1) % world], alpha=0.25)
        elif how == "pseudo gradients":
            moved = first - param
            dist.all_reduce(moved)
            param.copy_(first - 0.7 * moved / world)
            first.copy_(param)
        else:
            dist.all_reduce(param.data)
            param.div_(world)


def train_post_local(run_dir: str) -> None:
    """Post-local SGD: from the third step on DDP's hook reduces over this rank alone."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with attach(run_dir, steps=range(RECORDED)):
        model = torch.nn.parallel.DistributedDataParallel(Net())
        alone = dist.new_subgroups(1)[0]
        model.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=2), post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=2)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), averager)
        num_tokens = sum(int((batch(one, 0)[1] >= 0).sum()) for one in range(2)) / 2
        for _ in range(STEPS):
            (token_sum(model, batch(rank, 0)) / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_copies(averaged: str, run_dir: str | None) -> int:
    """A model in bfloat16 whose optimizer steps float32 copies, and no gradient is reduced. `averaged`: every second
    step its "parameters" are averaged, or the "copies", or nothing is."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir, steps=range(RECORDED)) if run_dir else contextlib.nullcontext():
        model = Net().bfloat16()
        copies = [torch.nn.Parameter(param.detach().float()) for param in model.parameters()]
        optimizer = torch.optim.SGD(copies, lr=0.05)
        for step in range(STEPS):
            (token_sum(model, batch(rank, 0)) / int((batch(rank, 0)[1] >= 0).sum())).backward()
            for param, copy in zip(model.parameters(), copies, strict=True):
                copy.grad, param.grad = None if param.grad is None else param.grad.float(), None
            optimizer.step()
            if averaged == "copies" and step % 2:
                average("parameters", copies, copies, rank, world)
            for param, copy in zip(model.parameters(), copies, strict=True):
                param.data.copy_(copy.data)
            if averaged == "parameters" and step % 2:
                params = list(model.parameters())
                average("parameters", params, params, rank, world)
    dist.barrier()
    dist.destroy_process_group()
    return zlib.crc32(b"".join(param.detach().float().numpy().tobytes() for param in model.parameters()))


def train_flat(read: str, run_dir: str | None) -> int:
    """An update by hand. Gradients are reduced in a flat copy, and `read` is what the update reads: that "buffer" (a
    part on each rank, which all gather), or "grad", whose owner forgot to write back."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir, steps=range(RECORDED)) if run_dir else contextlib.nullcontext():
        model = Net()
        params = list(model.parameters())
        num_tokens = sum(int((batch(one, 0)[1] >= 0).sum()) for one in range(world))
        for _ in range(STEPS):
            (token_sum(model, batch(rank, 0)) / num_tokens).backward()
            grads = [param.grad for param in params if param.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            sizes = [param.numel() for param in params]
            if read == "buffer":
                mine = torch.zeros_like(flat)
                part = -(-len(flat) // world)
                own = slice(rank * part, (rank + 1) * part)
                mine[own] = torch.cat([param.detach().flatten() for param in params])[own] - 0.05 * flat[own]
                dist.all_reduce(mine)
                updated = mine.split(sizes)
            else:
                updated = [(param.detach() - 0.05 * grad).flatten() for param, grad in zip(params, grads, strict=True)]
            for param, values in zip(params, updated, strict=True):
                param.data.copy_(values.view_as(param))
            model.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in params))


def train_in_loops(kind: str, run_dir: str | None) -> int:
    """Models of a few steps each, which begin as one: "copies" of it that ranks average, or "of each rank" (a search);
    or the model itself, with an optimizer of its own for each loop ("one model")."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir, steps=range(RECORDED)) if run_dir else contextlib.nullcontext():
        model = Net()
        for loop in range(STEPS):
            inner = model if kind == "one model" else copy.deepcopy(model)
            optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
            for k in range(2):
                data = batch(rank, 2 * loop + k)
                optimizer.zero_grad()
                (token_sum(inner, data) / (data[1] >= 0).sum()).backward()
                optimizer.step()
            if kind == "copies":
                for param, adapted in zip(model.parameters(), inner.parameters(), strict=True):
                    moved = adapted.detach() - param.detach()
                    dist.all_reduce(moved)
                    param.data.add_(moved, alpha=1 / world)
    dist.barrier()
    dist.destroy_process_group()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))
