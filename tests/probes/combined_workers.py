"""Trainers of two axes at once, with reductions in parts and unequal tokens, each with some faults, for
test_combined_axes.py. A fault's line ends with its name in a comment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from combined_layers import Parted, Whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY, WIDTH, STEPS = 16, 12, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(VOCABULARY, WIDTH), Block(), Block(), nn.Linear(WIDTH, VOCABULARY, bias=False))


def batch(step: int, place: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and labels of some rows, of which another number counts in each batch."""
    generator = torch.Generator().manual_seed(100 * step + place)
    x = torch.randint(0, VOCABULARY, (rows, 9), generator=generator)
    y = x[:, 1:].clone()
    for row in y:
        row[int(torch.randint(2, 9, (1,), generator=generator)) :] = -100
    return x[:, :-1], y


def token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def count(data: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.tensor(sum(int((y >= 0).sum()) for _, y in data))


def accumulate(model: nn.Module, data: list[tuple[Tensor, Tensor]], group: dist.ProcessGroup | None = None) -> None:
    """A pass for each batch, over the tokens of all of them on the ranks of a group."""
    tokens = count(data)
    dist.all_reduce(tokens, group=group)
    for x, y in data:
        (token_sum(model(x), y) / tokens).backward()


def run(trainer: str, fault: str, run_dir: str) -> None:
    """Train two steps with a fault, "" for none."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir):
        trainers[trainer](fault)
    dist.barrier()
    dist.destroy_process_group()


def nodes(fault: str) -> None:
    """Nodes of unequal sizes: reduced to a leader each, which sum and broadcast."""
    rank, of_node = dist.get_rank(), [[0, 1], [2]]
    groups, leaders = [dist.new_group(ranks) for ranks in of_node], dist.new_group([0, 2])
    group, leader = groups[rank // 2], of_node[rank // 2][0]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        data = [batch(step, 10 * k + rank) for k in range(2)]
        accumulate(model, data, group if fault == "count_of_node" else None)
        for p in model.parameters():
            assert p.grad is not None
            dist.reduce(p.grad, leader, group=group)
            if rank == leader and fault != "no_leaders":
                dist.all_reduce(p.grad, group=leaders)
                if fault == "leaders_twice":
                    dist.all_reduce(p.grad, group=leaders)  # leaders_twice
                if fault == "leader_halves":
                    p.grad.mul_(0.3)  # leader_halves
            dist.broadcast(p.grad, leader, group=group)
        optimizer.step()
        optimizer.zero_grad()


def flat(fault: str) -> None:
    """A padded flat copy, reduce-scattered and gathered."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = [p.numel() for p in model.parameters()]
    size = sum(sizes)
    whole = torch.zeros(size + -size % (3 * world))
    shard = torch.zeros(whole.numel() // world)
    for step in range(STEPS):
        data = [batch(step, 10 * k + rank) for k in range(3)]
        accumulate(model, data)
        whole[:size] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        if fault == "divided_twice":
            whole.div_(world)  # divided_twice
        dist.reduce_scatter_tensor(shard, whole)
        if fault == "divided_twice":
            shard.div_(world)
        dist.all_gather_into_tensor(whole, shard)
        if fault == "summed_again":
            dist.all_reduce(whole)  # summed_again
        for p, new in zip(model.parameters(), whole[:size].split(sizes), strict=True):
            p.grad = new.view_as(p).clone()
        optimizer.step()
        optimizer.zero_grad()


def tensor_parallel(fault: str) -> None:
    """DTensor's tensor parallelism with sequence parallel norms below data parallelism by hand."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, model = mesh["dp"], Model()
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "3": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in (1, 2):
        plan |= {
            f"{i}.norm": SequenceParallel(),
            f"{i}.up": ColwiseParallel(input_layouts=Shard(1)),
            f"{i}.down": RowwiseParallel(output_layouts=Shard(1)),
        }  # type: ignore[dict-item]
    if fault == "plain_norm":
        del plan["2.norm"]
    parallelize_module(model, mesh["tp"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(STEPS):
        data = [batch(step, 10 * k + dp.get_local_rank()) for k in range(3)]
        if fault == "plain_norm" and dp.get_local_rank() == 1:
            data[1][1][:, 4:] = -100  # no label in what the second tensor-parallel rank has
        tokens = count(data)
        dist.all_reduce(tokens, group=dp.get_group())
        for x, y in data:
            loss = token_sum(model(x), y) / tokens
            (loss * 2 if fault == "doubled" else loss).backward()  # doubled
        for name, p in model.named_parameters():
            if fault == "plain_norm" and name.startswith("2.norm"):
                dist.all_reduce(p.grad, group=dp.get_group())
                continue
            assert isinstance(p.grad, DTensor)
            if p.grad.placements[0].is_partial():
                p.grad = p.grad.redistribute(placements=[Replicate()])
            if fault == "head_left_out" and name.startswith("3"):
                continue
            if fault == "over_shards" and any(one.is_shard() for one in p.placements):
                dist.all_reduce(p.grad.to_local(), group=mesh["tp"].get_group())  # over_shards
                continue
            dist.all_reduce(p.grad.to_local(), group=None if fault == "over_all" else dp.get_group())  # over_all
        optimizer.step()
        optimizer.zero_grad()


def pipeline(fault: str) -> None:
    """Two stages below data parallelism, two schedules a step; sums, which one line divides by all tokens, or the loss
    does ("averaged means")."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp, stage, model = mesh["dp"], mesh["pp"].get_local_rank(), Model()
    part = nn.Sequential(*list(model)[2 * stage : 2 * stage + 2])
    if "averaged" in fault:
        fully_shard(part, mesh=dp)
    runner = PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    divisor = [torch.tensor(1)]
    schedule = Schedule1F1B(runner, 3, loss_fn=lambda *pair: token_sum(*pair) / divisor[0], scale_grads=False)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    for step in range(STEPS):
        tokens = torch.tensor(0)
        if "means" in fault:
            divisor[0] = count([batch(step, 10 * k + other, rows=6) for k in range(2) for other in range(2)])
        for k in range(2):
            x, y = batch(step, 10 * k + dp.get_local_rank(), rows=6)
            tokens = count([(x, y)]) + (0 if fault == "last_count" else tokens)
            for p in part.parameters() if fault == "emptied" else ():
                p.grad = None
            if stage == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
        dist.all_reduce(tokens, group=dp.get_group())
        for p in part.parameters():
            assert p.grad is not None
            if "means" in fault:
                continue
            grad = p.grad.to_local() if fault == "averaged" else p.grad  # type: ignore[attr-defined]
            if fault not in ("averaged", "unreduced"):
                dist.all_reduce(grad, group=dp.get_group())
            if fault == "halved":
                grad.mul_(0.5)  # halved
            grad.div_(tokens)  # last_count
        optimizer.step()
        optimizer.zero_grad()


def hook(fault: str) -> None:
    """DDP with a hook that leaves buckets as they are, as trainers that reduce by themselves have."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn.parallel import DistributedDataParallel

    rank, world, model = dist.get_rank(), dist.get_world_size(), Model()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, noop_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        data = [batch(step, 10 * k + rank) for k in range(2)]
        tokens = count(data)
        dist.all_reduce(tokens)
        for k, (x, y) in enumerate(data):
            wrapped.require_backward_grad_sync = k == 1
            (token_sum(wrapped(x), y) * world / tokens).backward()  # never_reduced
        for p in model.parameters() if fault != "never_reduced" else ():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        optimizer.step()
        optimizer.zero_grad()


def cast(fault: str) -> None:
    """Gradients that are reduced in bfloat16, and divided when they are float32 again."""
    rank, world, model = dist.get_rank(), dist.get_world_size(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        data = [batch(step, 10 * k + rank) for k in range(2)]
        tokens = count(data)
        dist.all_reduce(tokens)
        for x, y in data:
            (token_sum(model(x), y) * (1 if fault == "averaged_again" else world) / tokens).backward()
        for p in model.parameters():
            assert p.grad is not None
            coarse = p.grad.bfloat16()
            dist.all_reduce(coarse)
            p.grad = coarse.float()
            p.grad /= world  # averaged_again
        optimizer.step()
        optimizer.zero_grad()


def functional(fault: str) -> None:
    """Functional collectives on gradients, which no probe follows."""
    from torch.distributed._functional_collectives import all_reduce

    rank, model = dist.get_rank(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        data = [batch(step, 10 * k + rank) for k in range(2)]
        accumulate(model, data)
        for name, p in model.named_parameters():
            assert p.grad is not None and dist.group.WORLD is not None
            total = all_reduce(p.grad, "sum", dist.group.WORLD)
            if not (fault == "not_copied" and name.startswith("3")):
                p.grad.copy_(total)
        optimizer.step()
        optimizer.zero_grad()


def no_batch(fault: str) -> None:
    """A rank that has no batch in the second of four steps, or the first, and takes part with zeros."""
    rank, model = dist.get_rank(), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        data = (
            []
            if (step, rank) == (0 if fault == "none_at_first" else 1, 1)
            else [batch(step, 10 * k + rank) for k in range(2)]
        )
        tokens = count(data)
        dist.all_reduce(tokens)
        for x, y in data:
            loss = token_sum(model(x), y) / tokens
            (loss * 2 if fault == "doubled_later" and step else loss).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()


def sequence_hooks(fault: str) -> None:
    """DDP over data ranks, which split each row between two: hooks sum what these have accumulated, before DDP does."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    data_group, sequence_group = mesh["dp"].get_group(), mesh["sp"].get_group()
    own = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
    model = Model()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=data_group)
    last = False

    def add_up(param: Tensor) -> None:
        assert param.grad is not None
        if fault != "parts_left_out" and (last or fault == "parts_each_pass"):
            dist.all_reduce(param.grad, group=sequence_group)  # parts_each_pass
        if fault == "parts_scaled" and last:
            param.grad.mul_(0.3)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(add_up)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        data = [batch(step, 10 * k + rank // 2) for k in range(3)]
        tokens = count(data)
        dist.all_reduce(tokens, group=data_group)
        for k, (x, y) in enumerate(data):
            last = k == len(data) - 1
            with nullcontext() if last else wrapped.no_sync():
                (token_sum(wrapped(x[:, own]), y[:, own]) * 2 / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def hook_over_nodes(fault: str) -> None:
    """DDP within nodes, with a hook that sums between these as well, for losses times the ranks."""
    rank, world, model = dist.get_rank(), dist.get_world_size(), Model()
    nodes, across = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    node, peers = nodes[rank // 2], across[rank % 2]

    def reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        dist.all_reduce(bucket.buffer(), group=node)
        dist.all_reduce(bucket.buffer(), group=peers)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(2 * world if fault == "halved_in_hook" else world))
        return done

    wrapped = nn.parallel.DistributedDataParallel(model, process_group=node)
    reduce.__annotations__.clear()  # postponed ones, which DDP takes for wrong types
    wrapped.register_comm_hook(None, reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, y = batch(step, rank)
        tokens = count([(x, y)])
        dist.all_reduce(tokens)
        (token_sum(wrapped(x), y) * world / tokens).backward()  # halved_in_hook
        optimizer.step()
        optimizer.zero_grad()


class Places(nn.Module):
    """Adds a trained place to each token. A rank's rows are drawn by itself: those of its part of a sequence."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(rows, WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def hook_of_shared(fault: str) -> None:
    """DDP over data ranks, which split each row between two: a hook reduces flat copies of all gradients over the
    former, and then of those that the latter share. Each rank keeps the places of its part."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    data_group, sequence_group = mesh["dp"].get_group(), mesh["sp"].get_group()
    own = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
    model = Model()
    model.insert(1, Places(4, rank % 2))

    def over(params: list[Tensor], group: dist.ProcessGroup) -> None:
        flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        dist.all_reduce(flat, group=group)
        for p, summed in zip(params, flat.split([p.numel() for p in params]), strict=True):
            assert p.grad is not None
            p.grad.copy_(summed.view_as(p))

    def reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        over(bucket.parameters(), data_group)
        shared = [p for p in bucket.parameters() if p.shape != (4, WIDTH) or fault == "parts_summed"]
        for p in shared if fault == "one by one" else ():
            assert p.grad is not None
            dist.all_reduce(p.grad, group=sequence_group)
        if fault not in ("shared_left_out", "one by one"):
            over(shared, sequence_group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().mul_(2) if fault == "doubled_in_hook" else bucket.buffer())
        return done

    wrapped = nn.parallel.DistributedDataParallel(model, process_group=data_group, gradient_as_bucket_view=True)
    reduce.__annotations__.clear()
    wrapped.register_comm_hook(None, reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        data = [batch(step, 10 * k + rank // 2) for k in range(2)]
        tokens = count(data)
        dist.all_reduce(tokens, group=data_group)
        for k, (x, y) in enumerate(data):
            with nullcontext() if k == len(data) - 1 else wrapped.no_sync():
                (token_sum(wrapped(x[:, own]), y[:, own]) / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def hook_beside_activations(fault: str) -> None:
    """DDP over data ranks with a hook, around layers whose backward sums activations over tensor-parallel ranks."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_group, parts = mesh["dp"].get_group(), mesh["tp"].get_group()
    model = Model()
    model.insert(2, Parted(WIDTH, rank % 2, parts))

    def reduce(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        dist.all_reduce(bucket.buffer(), group=data_group)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().mul_(2) if fault == "doubled_in_hook" else bucket.buffer())
        return done

    wrapped = nn.parallel.DistributedDataParallel(model, process_group=data_group)
    reduce.__annotations__.clear()
    wrapped.register_comm_hook(None, reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, y = batch(step, rank // 2)
        tokens = count([(x, y)])
        dist.all_reduce(tokens, group=data_group)
        (token_sum(wrapped(x), y) / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_on_parts(fault: str) -> None:
    """Data ranks, of which each row is split between two: a layer's gradient is whole on both, and is reduced over the
    former alone; the others' are summed over the latter, too."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    data_group, sequence_group = mesh["dp"].get_group(), mesh["sp"].get_group()
    own = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
    model = Model()
    model.insert(2, Whole(WIDTH, sequence_group))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x, y = batch(step, rank // 2)
        tokens = count([(x, y)])
        dist.all_reduce(tokens, group=data_group)
        (token_sum(model(x[:, own]), y[:, own]) / tokens).backward()
        for name, p in model.named_parameters():
            if not ("wide" in name and fault == "not over data"):
                dist.all_reduce(p.grad, group=data_group)
            if "wide" not in name:
                dist.all_reduce(p.grad, group=sequence_group)
        optimizer.step()
        optimizer.zero_grad()


trainers: dict[str, Callable[[str], None]] = {
    "nodes": nodes,
    "flat": flat,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "hook": hook,
    "cast": cast,
    "functional": functional,
    "no_batch": no_batch,
    "sequence_hooks": sequence_hooks,
    "hook_over_nodes": hook_over_nodes,
    "hook_of_shared": hook_of_shared,
    "hook_beside_activations": hook_beside_activations,
    "whole_on_parts": whole_on_parts,
}
