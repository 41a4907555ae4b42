"""Data parallelism that autograd does by itself, on two ranks, for test_dtensor.py."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.utils import parametrize

WIDTH, WORDS, TOKENS, STEPS, ACCUMULATION = 16, 32, 24, 2, 2
VARIANTS = ("sharded", "sharded, averaged", "replicated", "replicated, averaged", "read as summands",
            "read as summands, averaged", "read as summands, averaged and multiplied",
            "read as summands, averaged and redistributed", "computed, summed by hand",
            "all DTensors", "all DTensors, summed by hand", "local summands of logits",
            "sequence parallel, clipped by local norms", "sequence parallel",
            "sequence parallel, clipped by own norms", "sequence parallel, summands summed",
            "sequence parallel, half the loss on a rank", "local", "local, not declared",
            "local, whole declared summed", "local, summands declared copies", "local between copies",
            "local between copies, not declared", "experts, gathered tokens",
            "experts, gathered tokens, declared", "experts, own tokens again")  # fmt: skip


class Whole(nn.Module):
    """Gathers a parameter in forward; its gradients are summands over the mesh."""

    def __init__(self, reduce_op: str) -> None:
        super().__init__()
        self.reduce_op = reduce_op

    def forward(self, param: Any) -> Tensor:
        whole = param.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial(self.reduce_op)])


class Declared(Whole):
    """Leaves what it declares to whoever reads the gradient."""

    def forward(self, param: Any) -> Tensor:
        return param.to_local(grad_placements=[Partial(self.reduce_op)])  # type: ignore[no-any-return]


class Computed(nn.Module):
    """Weights that are computed from a parameter, a copy of which lies on each data rank."""

    def forward(self, param: Any) -> Tensor:
        return (param * 1.0).to_local()


class Local(nn.Module):
    """A feed-forward layer between parts of a sequence, computed on what lies here of its weights."""

    def __init__(self, mesh: Any, variant: str) -> None:
        super().__init__()
        self.mesh, self.variant = mesh, variant
        self.up = nn.Parameter(distribute_tensor(torch.randn(2 * WIDTH, WIDTH) / 4, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(torch.randn(WIDTH, 2 * WIDTH) / 4, mesh, [Shard(1)]))

    def forward(self, x: Any) -> Any:
        summands = None if "not declared" in self.variant else [Partial()]
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=summands)
        with torch.no_grad():  # a statistic
            self.total = DTensor.from_local(whole, self.mesh, [Replicate()]).full_tensor().sum()
        up, down = (param.to_local() for param in (self.up, self.down))
        y = torch.tanh(whole @ up.T) @ down.T
        made = DTensor.from_local(y, self.mesh, [Replicate() if "declared copies" in self.variant else Partial()])
        return x + made.redistribute(placements=[Shard(1)])


class LocalBetweenCopies(Local):
    """The same between tensors that all ranks hold whole."""

    def forward(self, x: Tensor) -> Tensor:
        summands = None if "not declared" in self.variant else [Partial()]
        whole = DTensor.from_local(x, self.mesh, [Replicate()]).to_local(grad_placements=summands)
        up, down = (param.to_local() for param in (self.up, self.down))
        made = DTensor.from_local(torch.tanh(whole @ up.T) @ down.T, self.mesh, [Partial()])
        return x + made.redistribute(placements=[Replicate()]).to_local()


class Experts(nn.Module):
    """An expert on each data rank, which computes on all ranks' tokens, or an identity made of the same steps."""

    def __init__(self, mesh: Any, variant: str) -> None:
        super().__init__()
        self.mesh, self.variant = mesh, variant
        self.own = nn.Parameter(torch.randn(2, WIDTH, WIDTH)[dist.get_rank()] / 4)

    def forward(self, x: Tensor) -> Tensor:
        summands = [Partial()] if "declared" in self.variant else None
        whole = DTensor.from_local(x, self.mesh, [Shard(0)]).full_tensor(grad_placements=summands)
        if "own tokens" in self.variant:
            return torch.tanh(whole.chunk(2)[dist.get_rank()] @ self.own)
        made = DTensor.from_local(torch.tanh(whole @ self.own), self.mesh, [Partial()])
        return x + made.redistribute(placements=[Shard(0)]).to_local()  # type: ignore[no-any-return]


class ToLocal(nn.Module):
    """What all ranks go on with alike."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.declared = [Partial()] if "whole declared summed" in variant else None

    def forward(self, x: Any) -> Tensor:
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=self.declared)


def local_model(variant: str, mesh: Any) -> nn.Module:
    """Sequence parallel, by hand. No copy of a parameter shows what comes back through the layers."""
    if variant.startswith("local between copies"):
        layers = [LocalBetweenCopies(mesh, variant) for _ in range(2)]
        return nn.Sequential(nn.Linear(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
    model = nn.Sequential(nn.Linear(WORDS, WIDTH), Local(mesh, variant), Local(mesh, variant), ToLocal(variant),
                          nn.Linear(WIDTH, WORDS))  # fmt: skip
    return parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Shard(1), use_local_output=False)})


def model_of(variant: str, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WORDS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))
    if variant.startswith("all DTensors"):
        return distribute_module(model, mesh)
    if variant == "local summands of logits":
        model[2].register_parameter("bias", None)  # a copy, whose gradients would differ
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Partial())})
    if "experts" in variant:
        return nn.Sequential(nn.Linear(WORDS, WIDTH), Experts(mesh, variant), nn.Linear(WIDTH, WORDS))
    if "local" in variant.split(",")[0]:
        return local_model(variant, mesh)
    if "sequence parallel" in variant:
        model = nn.Sequential(nn.Linear(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
        plan = {
            "0": ColwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "1": SequenceParallel(),
            "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, plan)
    placement = Shard(0) if "sharded" in variant else Replicate()
    for layer in (model[0], model[2]):
        for name, param in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(param.data, mesh, [placement])))
            gathers = Declared if "read as" in variant else Whole
            whole = Computed() if "computed" in variant else gathers("avg" if "averaged" in variant else "sum")
            parametrize.register_parametrization(layer, name, whole, unsafe=True)
    return model


def clip(model: nn.Module, own: bool) -> None:
    """Clip by the norms of what lies here, summed over ranks: what is replicated, or a summand, is counted by each.
    `own`: not summed."""
    grads: list[Any] = [param.grad for param in model.parameters()]
    squares = torch.stack([grad.to_local().norm() ** 2 for grad in grads]).sum()
    if not own:
        dist.all_reduce(squares)
    for grad in grads:
        grad.to_local().mul_(0.05 / squares.sqrt())


def train(variant: str) -> int:
    """Two steps; returns a checksum of this rank's parameters."""
    mesh = init_device_mesh("cpu", (2,))
    model = model_of(variant, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    one_batch = "sequence parallel" in variant or variant.startswith("local")
    shape = (4, TOKENS // 4) if one_batch else (TOKENS,)
    data = torch.Generator().manual_seed(0 if one_batch else dist.get_rank())
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            ids, labels = torch.randint(WORDS, (2, *shape), generator=data)
            inputs: Tensor = F.one_hot(ids, WORDS).float()
            if variant.startswith("all DTensors"):
                inputs, labels = (DTensor.from_local(one, mesh, [Shard(0)]) for one in (inputs, labels))
            num_tokens = ACCUMULATION * TOKENS * (1 if one_batch else 2)
            loss = F.cross_entropy(model(inputs).transpose(1, -1), labels, reduction="sum") / num_tokens
            loss = loss * 2 if "and multiplied" in variant else loss
            if "half the loss" in variant and dist.get_rank() == 1:
                loss = loss / 2
            loss.backward()
        for param in model.parameters() if "by hand" in variant else ():
            dist.all_reduce(param.grad.to_local())  # type: ignore[union-attr]
        for param in model.parameters() if "and redistributed" in variant else ():
            param.grad = param.grad.redistribute(placements=[Replicate()])  # type: ignore[union-attr]
        for layer in (model[0], model[2]) if "experts" in variant else ():
            for param in layer.parameters():
                dist.all_reduce(param.grad)
        for param in model[1].parameters() if "summands summed" in variant else ():
            dist.all_reduce(param.grad.to_local())  # type: ignore[union-attr]
        if "clipped" in variant:
            clip(model, own="own norms" in variant)
        optimizer.step()
        optimizer.zero_grad()
    held = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in held))


def train_all(folder: str) -> list[tuple[int, int]]:
    """Every variant without probes and with them; checksums of both."""
    return with_and_without(train, VARIANTS, folder)
