"""Ranks of hybrid-parallel trainers as people write them, with torch alone, for test_red_team_parallel.py."""

import contextlib
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, LENGTH, BATCH = 24, 16, 8, 3
STEPS, ACCUMULATION = 2, 3
Data = tuple[Tensor, Tensor]


def tokens(data_rank: int, k: int) -> Data:
    generator = torch.Generator().manual_seed(100 * data_rank + k)
    inputs, labels = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=generator)
    labels.view(-1)[: 1 + (3 * data_rank + 2 * k) % 5] = -100
    return inputs, labels


def token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        nn.init.zeros_(self.up.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Embedding(VOCAB, DIM), Block()
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.block(self.embed(inputs)))


def subgroup(groups: list[list[int]]) -> dist.ProcessGroup:
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


class Copy(torch.autograd.Function):
    """Megatron's f: identity forward, a sum over the tensor-parallel ranks backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """Megatron's g: a sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty(x.shape)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        out = torch.empty(grad.shape)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


def step_of(
    model: nn.Module, loss: Callable[[int, Tensor], Tensor], data: list[Data], group: Any, variant: str
) -> None:
    """Accumulate, with the tokens of all data-parallel ranks under every loss."""
    num_tokens = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
    dist.all_reduce(num_tokens, group=group)
    for k in range(len(data)):
        if variant.startswith("ddp"):
            model.require_backward_grad_sync = k == len(data) - 1  # type: ignore[assignment]
        loss(k, num_tokens).backward()


def tensor_parallel(variant: str) -> Any:
    """DTensors over tp, DDP or FSDP2 over dp."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: nn.Module = Net()
    parallelize_module(model, mesh["tp"], {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()})
    if variant.startswith("ddp"):
        _pre_dp_module_transform(model)
        model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    else:
        fully_shard(model, mesh=mesh["dp"])
    scale = 1 if "averaged twice" in variant else 2
    data = [tokens(mesh["dp"].get_local_rank(), k) for k in range(ACCUMULATION)]

    def loss(k: int, num_tokens: Tensor) -> Tensor:
        logits = model(data[k][0])
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        return token_sum(logits, data[k][1]) * scale / num_tokens

    return model, lambda: step_of(model, loss, data, mesh["dp"].get_group(), variant)


def vocab_parallel(variant: str) -> Any:
    """Column-parallel head and a cross entropy over its shards, by hand."""
    rank = dist.get_rank()
    tp, dp = subgroup([[0, 1], [2, 3]]), subgroup([[0, 2], [1, 3]])
    model, half, first = Net(), VOCAB // 2, rank % 2 * (VOCAB // 2)
    shard = model.head.weight.detach()[first : first + half].clone()
    model.head = nn.Linear(DIM, half, bias=False)
    model.head.weight.data.copy_(shard)
    data = [tokens(rank // 2, k) for k in range(ACCUMULATION)]

    def loss(k: int, num_tokens: Tensor) -> Tensor:
        inputs, labels = data[k]
        logits = model.head(Copy.apply(model.block(model.embed(inputs)), tp))
        here = (labels >= first) & (labels < first + half)
        total = Sum.apply(logits.exp().sum(-1), tp)
        picked = Sum.apply(logits.gather(-1, (labels - first).clamp(0, half - 1)[..., None])[..., 0] * here, tp)
        return ((total.log() - picked) * (labels >= 0)).sum() / num_tokens

    def step() -> None:
        step_of(model, loss, data, dp, variant)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=dp)

    return model, step


def expert_parallel(variant: str) -> Any:
    """One expert a rank of ep, its replicas on the ranks of edp; every token visits both."""
    rank = dist.get_rank()
    ep, edp = subgroup([[0, 1], [2, 3]]), subgroup([[0, 2], [1, 3]])
    model = Net()
    torch.manual_seed(rank % 2)
    expert = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
    nn.init.zeros_(expert[0].bias)
    model.expert = expert
    data = [tokens(rank, k) for k in range(ACCUMULATION)]
    scale = 1
    if variant.startswith("fsdp"):
        _shard_experts(model, "divided by all" in variant)
        scale = 4

    def loss(k: int, num_tokens: Tensor) -> Tensor:
        hidden = model.block(model.embed(data[k][0]))
        sent = Exchange.apply(torch.stack([hidden, hidden]), ep)
        hidden = hidden + Exchange.apply(expert(sent), ep).sum(0)
        return token_sum(model.head(hidden), data[k][1]) * scale / num_tokens

    def step() -> None:
        step_of(model, loss, data, None, variant)
        for name, param in model.named_parameters() if scale == 1 else ():
            if not name.startswith("expert"):
                dist.all_reduce(param.grad)
            elif "never reduced" not in variant:
                dist.all_reduce(param.grad, group=None if "world" in variant else edp)

    return model, step


def _shard_experts(model: Any, divided_by_all: bool) -> None:
    """FSDP2 over the ranks that hold one expert, over all ranks for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.expert, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))["edp"])
    if divided_by_all:
        model.expert.set_gradient_divide_factor(4)
        model.expert.set_force_sum_reduction_for_comms(True)
    everyone = init_device_mesh("cpu", (4,))
    for module in (model.embed, model.block, model.head):
        fully_shard(module, mesh=everyone)


class SumTwice(Sum):
    """As torch.distributed.nn.functional sums: right where each rank has a loss of its own."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def shared_experts(variant: str) -> Any:
    """Two ranks of ep have one batch: each lets its own expert see every token, and what both make is summed. Layers
    that both compute alike follow. Ranks train on the sum of their losses, or on one loss."""
    from torch.nn.parallel import DistributedDataParallel

    rank, one_loss = dist.get_rank(), variant.startswith("one loss")
    ep, edp = subgroup([[0, 1], [2, 3]]), subgroup([[0, 2], [1, 3]])
    model = Net()
    model.more = nn.Sequential(Block(), Block(), Block())
    torch.manual_seed(0 if "one seed" in variant else rank % 2)
    model.expert = expert = nn.Linear(DIM, DIM)
    trained: Any = model
    if "ddp" in variant:
        ignored = [name for name, _ in model.named_parameters() if name.startswith("expert")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        trained = DistributedDataParallel(model)
    own = torch.arange(VOCAB) % 2 == rank % 2
    data = [tokens(rank // 2, k) for k in range(ACCUMULATION)]

    def forward(inputs: Tensor) -> Tensor:
        hidden = model.block(model.embed(inputs))
        enter = Copy.apply(hidden, ep) if one_loss else hidden
        made = torch.tanh(expert(enter)) * own[inputs][..., None]
        hidden = hidden + (Sum if one_loss else SumTwice).apply(made, ep)
        return model.head(model.more(hidden))  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]

    def loss(k: int, num_tokens: Tensor) -> Tensor:
        return token_sum(trained(data[k][0]), data[k][1]) * (1 if one_loss else 2) / num_tokens

    def step() -> None:
        step_of(trained, loss, data, edp, variant)
        for name, param in model.named_parameters():
            is_expert = name.startswith("expert")
            if one_loss or is_expert or "ddp" not in variant:
                own = one_loss or is_expert or "copies apart" in variant
                dist.all_reduce(param.grad, group=edp if own else None)
            if not one_loss and (is_expert or "ddp" not in variant):
                param.grad /= 2 if is_expert and "own ranks" in variant else 4

    return model, step


def pipeline(variant: str) -> Any:
    """Two stages by send and receive."""
    rank = dist.get_rank()
    whole = Net()
    model = nn.Sequential(whole.embed, whole.block) if rank == 0 else nn.Sequential(Block(), whole.head)
    data = [tokens(0, k) for k in range(ACCUMULATION)]
    num_tokens = sum(int((labels >= 0).sum()) for _, labels in data) / (2 if "times pp" in variant else 1)

    def step() -> None:
        outputs, sent = [], []
        for inputs, labels in data:
            if rank == 0:
                outputs.append(model(inputs))
                sent.append(outputs[-1].detach().clone())
                dist.send(sent[-1], 1)
                continue
            hidden = torch.empty(BATCH, LENGTH, DIM)
            dist.recv(hidden, 0)
            (token_sum(model(hidden.requires_grad_()), labels) / num_tokens).backward()
            sent.append(hidden.grad)
        for k, gradient in enumerate(sent):
            if rank == 0:
                dist.recv(gradient, 1)
                outputs[k].backward(gradient)
            else:
                dist.send(gradient, 0)
        if "clipped" not in variant:
            return
        square = torch.stack([param.grad.pow(2).sum() for param in model.parameters()]).sum()
        if "alone" in variant:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            return
        dist.all_reduce(square)
        for param in model.parameters():
            param.grad.mul_(0.3 / square.sqrt())

    return model, step


TRAINERS = {
    "tensor": tensor_parallel,
    "vocab": vocab_parallel,
    "experts": expert_parallel,
    "shared experts": shared_experts,
    "pipeline": pipeline,
}


def train(kind: str, variant: str, run_dir: str | None) -> int:
    """Train two steps; returns a checksum of the rank's parameters."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir) if run_dir else contextlib.nullcontext():
        model, step = TRAINERS[kind](variant)
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.01)
        for _ in range(STEPS):
            step()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    held = [getattr(param, "_local_tensor", param).detach() for param in params]
    return zlib.crc32(b"".join(part.contiguous().numpy().tobytes() for part in held))
