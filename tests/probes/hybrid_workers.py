"""Two ways to split four ranks at once, as people write it, for test_hybrid.py: shards and replicas by hand, a pipeline
by hand below DDP, experts beside shards."""

import contextlib
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS, ROWS, LENGTH, STEPS, PASSES = 8, 23, 2, 8, 2, 3
VARIANTS = (
    "replicas averaged",
    "replicas summed",
    "pipeline",
    "pipeline, halved on the way",
    "experts",
    "experts, summed over both",
)


class Body(nn.Module):
    """Its tensors end nowhere near half of its elements: a flat parameter's shards cut one of them."""

    def __init__(self, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.first, self.last = first, last
        if first:
            self.words = nn.Embedding(WORDS, WIDTH)
            self.up = nn.Linear(WIDTH, 3 * WIDTH)
        if last:
            self.down = nn.Linear(3 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, given: Tensor) -> Tensor:
        if self.first:
            given = torch.tanh(self.up(self.words(given)))
        output: Tensor = self.head(torch.tanh(self.down(given))) if self.last else given
        return output


def batch(data_rank: int, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels, each of shape (ROWS, LENGTH); as many labels count as the pass says."""
    source = torch.Generator().manual_seed(1 + number + PASSES * (data_rank + 10 * step))
    ids, labels = torch.randint(WORDS, (2, ROWS, LENGTH), generator=source)
    labels[0, : 1 + (data_rank + number) % 3] = -100
    return ids, labels


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def counted(data_rank: int, step: int, group: dist.ProcessGroup | None = None) -> Tensor:
    tokens = torch.stack([(batch(data_rank, step, number)[1] >= 0).sum() for number in range(PASSES)]).sum().float()
    dist.all_reduce(tokens, group=group)
    return tokens


def steps(module: nn.Module, passes: Callable[[int], None]) -> int:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        passes(step)
        optimizer.step()
        optimizer.zero_grad()
    held = [getattr(param, "_local_tensor", param).detach() for param in module.parameters()]
    return zlib.crc32(b"".join(values.numpy().tobytes() for values in held))


def replicas(variant: str, mesh: DeviceMesh) -> int:
    """FSDP1 over the second dimension, a reduction by hand over the first."""
    model = FullyShardedDataParallel(
        Body(), process_group=mesh.get_group("two"), use_orig_params=True, device_id=torch.device("cpu")
    )

    def passes(step: int) -> None:
        tokens = counted(dist.get_rank(), step)
        for number in range(PASSES):
            with model.no_sync() if number < PASSES - 1 else contextlib.nullcontext():
                ids, labels = batch(dist.get_rank(), step, number)
                (summed(model(ids), labels) * 4 / tokens).backward()
        for param in model.parameters():
            if param.grad is not None and param.grad.numel():
                dist.all_reduce(param.grad, group=mesh.get_group("one"))
                param.grad /= 2 if "averaged" in variant else 1

    return steps(model, passes)


def pipeline(variant: str, mesh: DeviceMesh) -> int:
    """Two stages, one pass after the other."""
    data_rank, stage = mesh.get_local_rank("one"), mesh.get_local_rank("two")
    module, peer = Body(first=stage == 0, last=stage == 1), dist.get_rank() ^ 1
    model = DistributedDataParallel(module, process_group=mesh.get_group("one"))

    def one_pass(step: int, number: int, tokens: Tensor) -> None:
        ids, labels = batch(data_rank, step, number)
        if stage == 0:
            output = model(ids)
            dist.send(output.detach(), peer)
            gradient = torch.empty_like(output)
            dist.recv(gradient, peer)
            output.backward(gradient * (0.5 if "halved" in variant else 1.0))
        else:
            given = torch.empty(ROWS, LENGTH, 3 * WIDTH)
            dist.recv(given, peer)
            (summed(model(given.requires_grad_()), labels) * 2 / tokens).backward()
            assert given.grad is not None
            dist.send(given.grad, peer)

    def passes(step: int) -> None:
        tokens = counted(data_rank, step, mesh.get_group("one"))
        for number in range(PASSES):
            with model.no_sync() if number < PASSES - 1 else contextlib.nullcontext():
                one_pass(step, number, tokens)

    return steps(module, passes)


class Exchanged(torch.autograd.Function):
    """Each of two ranks sends the other half of its rows; the other way round in backward."""

    @staticmethod
    def forward(ctx: object, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        output = torch.empty_like(rows)
        dist.all_to_all_single(output, rows.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        output = torch.empty_like(gradient)
        dist.all_to_all_single(output, gradient.contiguous(), group=ctx.group)  # type: ignore[attr-defined]
        return output, None


class Sparse(nn.Module):
    """Of each sequence, the first half goes to the first rank's expert, the rest to the second's."""

    def __init__(self, group: dist.ProcessGroup, number: int) -> None:
        super().__init__()
        self.group = group
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        torch.manual_seed(7 + number)
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.words(ids).transpose(0, 1).reshape(-1, WIDTH)
        back = Exchanged.apply(torch.tanh(self.expert(Exchanged.apply(rows, self.group))), self.group)
        output: Tensor = self.head(back.view(LENGTH, ROWS, WIDTH).transpose(0, 1))
        return output


def experts(variant: str, mesh: DeviceMesh) -> int:
    """Experts are replicated over the first dimension and differ along the second; the rest is sharded over all."""
    model = Sparse(mesh.get_group("two"), mesh.get_local_rank("two"))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), ignored_params=set(model.expert.parameters()))

    def passes(step: int) -> None:
        tokens = counted(dist.get_rank(), step)
        for number in range(PASSES):
            ids, labels = batch(dist.get_rank(), step, number)
            (summed(model(ids), labels) * 4 / tokens).backward()
        for param in model.expert.parameters():
            assert param.grad is not None
            param.grad /= 4
            dist.all_reduce(param.grad, group=mesh.get_group("one"))
            if "over both" in variant:
                dist.all_reduce(param.grad, group=mesh.get_group("two"))

    return steps(model, passes)


def train(variant: str) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("one", "two"))
    torch.manual_seed(0)
    trainers = {"replicas": replicas, "pipeline": pipeline, "experts": experts}
    return trainers[variant.split()[0].removesuffix(",")](variant, mesh)


def train_all(folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, VARIANTS, folder)
