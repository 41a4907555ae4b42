"""Trainers of tensor-parallel layers by hand beside shards or stages, each with some faults, for test_mixed_axes.py. A
fault's line ends with its name in a comment."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, STEPS = 32, 16, 2


def subgroup(groups: list[list[int]]) -> Any:
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if dist.get_rank() in ranks)


class Whole(torch.autograd.Function):
    """What all ranks hold alike goes on to their shards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class Gathered(torch.autograd.Function):
    """ZeRO 3 by hand: the parts of all ranks, whose gradients are summed and parted again."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: tuple[int, ...], group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        whole = part.new_empty(2 * part.numel())
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        part = grad.new_empty(grad.numel() // 2)
        dist.reduce_scatter_tensor(part, grad.contiguous().flatten(), group=ctx.group)
        return part, None, None


class Parted(nn.Module):
    """A linear layer of which this rank holds half of the elements."""

    def __init__(self, rows: int, columns: int, seed: int, group: Any) -> None:
        super().__init__()
        self.shape, self.group = (rows, columns), group
        whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.3
        self.part = nn.Parameter(whole.flatten().chunk(2)[dist.get_rank(group)].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Gathered.apply(self.part, self.shape, self.group))


class Plain(nn.Linear):
    def __init__(self, rows: int, columns: int, seed: int, group: Any) -> None:
        torch.manual_seed(seed)
        super().__init__(columns, rows, bias=False)


class Model(nn.Module):
    """`layer` makes the layers; the middle ones are shards of tensor-parallel ranks. "vocabulary": so is the first one,
    which was drawn from one seed on all ranks; "told": it says that it is parted."""

    def __init__(self, layer: Any, tp: Any, dp: Any, fault: str) -> None:
        super().__init__()
        own = dist.get_rank(tp)
        self.tp, self.fault = tp, fault
        size = VOCABULARY // 2 if "vocabulary" in fault else VOCABULARY
        self.own = slice(own * size, (own + 1) * size) if "vocabulary" in fault else slice(None)
        self.first = layer(WIDTH, size, 11, dp)
        self.up, self.down = layer(24, WIDTH, 20 + own, dp), layer(WIDTH, 24, 30 + own, dp)
        self.head = layer(VOCABULARY, WIDTH, 12, dp)
        if "told" in fault:
            self.first.weight.tensor_model_parallel = True

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.first(F.one_hot(ids, VOCABULARY)[..., self.own].float())
        if "vocabulary" in self.fault:
            hidden = Added.apply(hidden, self.tp)
        inner = hidden if self.fault.startswith("unsummed") else Whole.apply(hidden, self.tp)
        return self.head(hidden + Added.apply(self.down(torch.tanh(self.up(inner))), self.tp))  # type: ignore[no-any-return]


def batch(generator: torch.Generator, rows: int = 3, keep: float = 0.7) -> tuple[Tensor, Tensor]:
    ids, labels = torch.randint(0, VOCABULARY, (2, rows, 6), generator=generator)
    return ids, torch.where(torch.rand(labels.shape, generator=generator) < keep, labels, torch.tensor(-100))


def token_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def shards(kind: str, fault: str) -> None:
    """Tensor-parallel layers whose parts data ranks shard, by hand or by FSDP1 (`kind`); a clip by hand that acts, by
    the norm of all ("clipped"), or of one axis' ranks ("norm of group")."""
    tp, dp = subgroup([[0, 1], [2, 3]]), subgroup([[0, 2], [1, 3]])
    model: nn.Module = Model(Parted if kind == "by hand" else Plain, tp, dp, fault)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        whole = "original" in fault
        model = FullyShardedDataParallel(model, process_group=dp, use_orig_params=whole, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank() // 2)
    for _ in range(STEPS):
        data = [batch(generator) for _ in range(2)]
        tokens = torch.tensor(float(sum(int((labels >= 0).sum()) for _, labels in data)))
        dist.all_reduce(tokens, group=dp)
        for ids, labels in data:
            (token_sum(model(ids), labels) / tokens * (2 if kind == "fsdp1" else 1)).backward()
        if kind == "by hand":
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            squares = torch.stack([grads[f"{name}.part"].square().sum() for name in ("up", "down")]).sum()
            dist.all_reduce(squares, group=tp)
            squares += grads["first.part"].square().sum() + grads["head.part"].square().sum()
            if "norm of group" not in fault:
                dist.all_reduce(squares, group=dp)
            for grad in grads.values():
                grad.mul_((0.3 / squares.sqrt()).clamp(max=1.0))  # norm of group
        optimizer.step()
        optimizer.zero_grad()


class Stage(nn.Module):
    def __init__(self, place: int, tp: Any, fault: str) -> None:
        super().__init__()
        torch.manual_seed(20 + place)
        self.place, self.tp, self.fault = place, tp, fault
        self.norm = nn.LayerNorm(WIDTH)
        self.ends = nn.Linear(WIDTH, VOCABULARY, bias=False) if place else nn.Embedding(VOCABULARY, WIDTH)
        torch.manual_seed(30 + 10 * place + dist.get_rank(tp))
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.place else self.ends(x)
        inner = self.norm(x) if self.fault == "unsummed" else Whole.apply(self.norm(x), self.tp)
        x = x + Added.apply(self.down(torch.tanh(self.up(inner))), self.tp)
        return self.ends(x) if self.place else x  # type: ignore[no-any-return]


def stages(fault: str) -> None:
    """Two stages of tensor-parallel layers by send and receive. "scaled": the first microbatch has few labels; "early":
    the last stage computes what it sends by autograd.grad, and the gradients of its parameters behind all that."""
    tp, place = subgroup([[0, 1], [2, 3]]), dist.get_rank() // 2
    stage, other = Stage(place, tp, fault), (dist.get_rank() + 2) % 4
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        data = [batch(generator, keep=0.06 if m == 0 and fault == "scaled" else 0.6) for m in range(3)]
        data[0][1][0, 0] = 1
        tokens = sum(int((labels >= 0).sum()) for _, labels in data)
        made: list[tuple[Tensor, Tensor]] = []
        for ids, labels in data:
            hidden = torch.empty(3, 6, WIDTH)
            if place:
                dist.recv(hidden, other)
                loss = token_sum(stage(hidden.requires_grad_()), labels) / tokens
                made.append((hidden, loss))
            else:
                made.append((stage(ids), hidden))
                dist.send(made[-1][0].detach(), other)
        for output, rest in made:
            if place == 0:
                dist.recv(rest, other)
                output.backward(rest / 3 if fault == "scaled" else rest)  # scaled
            elif fault == "early":
                dist.send(torch.autograd.grad(rest, output, retain_graph=True)[0], other)
            else:
                rest.backward()
                assert output.grad is not None
                dist.send(output.grad, other)
        for _, loss in made if place and fault == "early" else ():
            torch.autograd.backward(loss, inputs=list(stage.parameters()))
        optimizer.step()
        optimizer.zero_grad()


def run(trainer: str, fault: str, run_dir: str) -> None:
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir):
        stages(fault) if trainer == "stages" else shards(trainer, fault)
    dist.barrier()
    dist.destroy_process_group()
