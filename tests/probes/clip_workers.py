"""Ranks whose clips are wrong only together. No postponed annotations, as in probe_workers."""

from typing import Any

import torch
import torch.distributed as dist
from probe_workers import Net, batch, token_sum
from torch import Tensor, nn

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.result import TrainResult


def train(config: TrainConfig, run_dir: str) -> TrainResult:
    """The project's trainer, recorded."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    with attach(run_dir, objective="global-token-mean", axes=config.axes):
        return train(config)


def reduced_by_hand(run_dir: str, clip: str) -> None:
    """Two ranks that sum their gradients by hand and clip "before" or "after" that (and average them again), or "in
    the loop" over passes; or "by hand" after it, where one gradient is "not reduced", or "halved" on one rank; "by
    squares" behind a buffer in which they were averaged, or "only summed", or in which they "lie"."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir, objective="global-token-mean"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [batch(dist.get_rank(), k) for k in range(2)]
        total = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
        dist.all_reduce(total)
        for part in data:
            (token_sum(model, part) * (2 if "by squares" in clip else 1) / total).backward()
            if clip == "in the loop":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if clip == "before":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if "by squares" in clip:
            average_in_a_buffer_and_clip(model, "only summed" in clip, "lie" in clip)
        for param in list(model.parameters())["not reduced" in clip :] if "by squares" not in clip else ():
            dist.all_reduce(param.grad)
        if "after" in clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for param in model.parameters() if "averaged again" in clip else ():
            dist.all_reduce(param.grad)
            param.grad.div_(2)  # type: ignore[union-attr]
        if "halved" in clip and dist.get_rank() == 1:
            next(model.parameters()).grad.mul_(0.5)  # type: ignore[union-attr]
        if "by hand" in clip:
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.mul_(0.1 / norm)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def most_by_hand(run_dir: str, how: str) -> None:
    """Two ranks whose DDP reduces one parameter alone. The others are "averaged", "summed" or "left" as they are, and
    all gradients are clipped by hand."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir, objective="global-token-mean"):
        model = Net()
        others = [name for name, _ in model.named_parameters()][1:]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, others)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens, labels = batch(dist.get_rank(), 0)
        total = (labels >= 0).sum().float()
        dist.all_reduce(total)
        (token_sum(wrapped, (tokens, labels)) * dist.get_world_size() / total).backward()
        for name, param in model.named_parameters():
            if name in others and how != "left":
                dist.all_reduce(param.grad)
                param.grad.div_(dist.get_world_size() if how == "averaged" else 1)  # type: ignore[union-attr]
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = sum((grad * grad).sum() for grad in grads) ** 0.5
        for grad in grads:
            grad.mul_(0.01 / norm)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def average_in_a_buffer_and_clip(model: nn.Module, only_summed: bool, lie: bool) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    if lie:
        for param, part in zip(model.parameters(), flat.split([grad.numel() for grad in grads]), strict=True):
            param.grad = part.view_as(param)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
    dist.all_reduce(flat)
    if not only_summed:
        flat /= 2
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True) if not lie else ():
        grad.copy_(part.view_as(grad))
    squares = sum(float(grad.pow(2).sum()) for grad in grads)
    for grad in grads:
        grad.mul_(0.1 / squares**0.5)


def train_with_one_stages_norm(config: TrainConfig, run_dir: str, left_out: str = "") -> TrainResult:
    """The same, clipping by hand by a norm to which the pipeline's last stage adds nothing (DeepSpeed 0.19.8 does), or
    all but what is `left_out`."""
    from gradcheck_dist.trainer import clip

    def clip_gradients(model: torch.nn.Module, max_norm: float, pipeline_group: dist.ProcessGroup | None) -> float:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        counted = [param.grad for name, param in model.named_parameters() if name != left_out]
        squares = torch.stack([(grad * grad).sum() for grad in counted if grad is not None]).sum()
        total = squares if dist.get_rank() == 0 or left_out else torch.zeros(())
        dist.all_reduce(total)
        for grad in grads:
            grad.mul_(min(1.0, max_norm / float(total.sqrt())))
        return float(total.sqrt())

    clip.clip_gradients = clip_gradients
    return train(config, run_dir)


class Copied(torch.autograd.Function):
    """The same on all ranks; their gradients add up."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Added(torch.autograd.Function):
    """The sum over ranks; each gets its gradient."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        given = given.clone()
        dist.all_reduce(given)
        return given

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def train_tensor_parallel(run_dir: str, clip: str) -> None:
    """Two ranks hold halves of two layers and copies of the others. They divide by all tokens behind the backward pass
    and clip by the norm of all ("shared"), of their own ("own") or the mean of these ("averaged"); "counted once": one
    rank leaves the copies out."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    copies = nn.ModuleList([nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32)])
    torch.manual_seed(1 + rank)
    shards = nn.ModuleList([nn.Linear(16, 24), nn.Linear(24, 16, bias=False)])
    params = [*copies.parameters(), *shards.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    data = torch.Generator().manual_seed(0)
    with attach(run_dir):
        for _ in range(2):
            ids, labels = torch.randint(32, (2, 4, 6), generator=data)
            hidden = copies[1](copies[0](ids))
            hidden = hidden + Added.apply(shards[1](torch.tanh(shards[0](Copied.apply(hidden)))))
            loss = torch.nn.functional.cross_entropy(copies[2](hidden).flatten(0, 1), labels.flatten(), reduction="sum")
            loss.backward()
            for param in params:
                assert param.grad is not None
                param.grad.div_(24)
            counted = params if rank == 0 or "once" not in clip else list(shards.parameters())
            norm = torch.stack([param.grad.norm() for param in counted if param.grad is not None]).square().sum()
            if "shared" in clip:
                dist.all_reduce(norm)
            if "averaged" in clip:
                norm = norm.sqrt()
                dist.all_reduce(norm, op=dist.ReduceOp.SUM)
                norm = (norm / 2).square()
            scale = min(1.0, 0.1 / norm.sqrt().item())
            if "no norm" in clip:  # that all ranks end with
                scale = 0.1 / (norm.sqrt() + norm).item()
            for param in params:
                assert param.grad is not None
                param.grad.mul_(scale)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


class Normed(nn.Module):
    """A norm and two layers between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.first, self.last, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        made: Tensor = self.head(hidden + self.last(torch.tanh(self.first(self.norm(hidden)))))
        return made


def clip_summands(run_dir: str, whole: bool) -> None:
    """Two tensor-parallel ranks, of which each normalises its part of the sequences: the gradient of the norm is a sum
    over them, of which a clip by hand takes the `whole`, or each rank's summand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    parted = {"output_layouts": Shard(1), "use_local_output": False}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **parted),
        "norm": SequenceParallel(),
        "first": ColwiseParallel(input_layouts=Shard(1)),
        "last": RowwiseParallel(**parted),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    model = parallelize_module(Normed(), mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    with attach(run_dir):
        for _ in range(2):
            ids, labels = torch.randint(32, (2, 4, 6), generator=data)
            with loss_parallel():
                torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
            squares = torch.zeros(())
            grads: list[Any] = [param.grad for param in model.parameters()]
            for grad in grads:
                taken = (
                    grad.redistribute(placements=[Replicate()]) if whole and grad.placements[0].is_partial() else grad
                )
                square = taken.to_local().square().sum()
                if grad.placements[0].is_shard():
                    dist.all_reduce(square)
                squares += square
            for grad in grads:
                grad.mul_(min(1.0, 0.1 / float(squares.sqrt())))
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def zero_by_parameters(run_dir: str, norm: str) -> None:
    """Two ranks that average gradients of scaled losses, and own some parameters each, in one flat copy, whose gradient
    one line unscales and clips: by the norm of "all" parameters, or of the rank's "own"; "unscaled" in front of that by
    a line of its own; or which it never clips, of sums over ranks ("never, summed")."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, scale = dist.get_rank(), 1024.0
    with attach(run_dir):
        torch.manual_seed(0)
        model = Net()
        parts = [list(model.parameters())[first::2] for first in range(2)]
        flats = [torch.cat([param.data.flatten() for param in part]) for part in parts]
        for flat, part in zip(flats, parts, strict=True):
            for param, piece in zip(part, flat.split([one.numel() for one in part]), strict=True):
                param.data = piece.view_as(param)
        owned = flats[rank].clone().requires_grad_()
        optimizer = torch.optim.SGD([owned], lr=0.1)
        data = torch.Generator().manual_seed(rank)
        for _ in range(3):
            tokens, labels = torch.randint(20, (2, 4, 6), generator=data)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            (loss * scale).backward()
            for param in model.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= 1 if "summed" in norm else dist.get_world_size()
            owned.grad = torch.cat([param.grad.flatten() for param in parts[rank] if param.grad is not None])
            model.zero_grad()
            rest = scale
            if norm.startswith("unscaled"):
                owned.grad.mul_(1 / scale)
                rest = 1.0
            square = owned.grad.square().sum()
            if "own" not in norm:
                dist.all_reduce(square)
            most = 1e6 if "never" in norm else 0.01
            owned.grad.mul_(1 / (max(1.0, float(square.sqrt()) / rest / most) * rest))
            optimizer.step()
            flats[rank].copy_(owned.detach())
            for owner, flat in enumerate(flats):
                dist.broadcast(flat, src=owner)
    dist.destroy_process_group()
