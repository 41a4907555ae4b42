"""What ranks of the verification tests run: tensor parallelism by hand, right and wrong."""

import contextlib
import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from verify_models import VOCAB, WIDTH, batch, loss_of

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.result import TrainResult


def train_verified(config: TrainConfig, run_dir: str | None) -> TrainResult:
    """The project's trainer; verified when a run folder is given."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    if run_dir is None:
        return train(config)
    with attach(run_dir, objective="global-token-mean", axes=config.axes, verify=True):
        return train(config)


def train_pipeline(config: TrainConfig, factor: float, run_dir: str | None) -> TrainResult:
    """The same, with a factor on the gradients that a stage receives from the next."""
    from torch.distributed.pipelining import stage

    received = stage._PipelineStageBase._retrieve_recv_grads

    def scaled(self: Any, chunk: int) -> tuple[Any, ...]:
        return tuple(None if grad is None else grad * factor for grad in received(self, chunk))

    stage._PipelineStageBase._retrieve_recv_grads = scaled
    return train_verified(config, run_dir)


class Enter(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward; `summed` False leaves that out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
        ctx.summed = summed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.summed:
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad, None


class Leave(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward; `again` sums once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: bool) -> Tensor:
        ctx.again = again
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.again:
            grad = grad.clone()
            dist.all_reduce(grad)
        return grad, None


class Split(nn.Module):
    """A feed-forward layer split over all ranks: column-parallel, then row-parallel."""

    def __init__(self, fault: str, residual: bool) -> None:
        super().__init__()
        self.fault, self.residual = fault, residual
        rank, world = dist.get_rank(), dist.get_world_size()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).chunk(world)[rank].clone() / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).chunk(world, 1)[rank].clone() / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        if fault == "biases of both":  # one of a shard, that looks like a copy as long as it is zero
            self.shift = nn.Parameter(torch.zeros(2 * WIDTH // world))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Enter.apply(self.norm(x), self.fault != "no sum")
        hidden = hidden @ self.up.t()
        hidden = F.gelu(hidden + self.shift if self.fault == "biases of both" else hidden)
        part = self.bias / dist.get_world_size() if self.fault == "bias divided" else 0.0
        out = Leave.apply(hidden @ self.down.t() + part, self.fault == "sums again")
        out = out if self.fault == "bias divided" else out + self.bias
        return x + out if self.residual else out


class SplitModel(nn.Module):
    def __init__(self, fault: str, residual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Split("", residual), Split(fault, residual)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tensor_parallel_by_hand(fault: str, residual: bool, run_dir: str | None) -> int:
    """Two steps on the same data on every rank; returns a checksum of this rank's parameters."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    recorded = (
        attach(run_dir, objective="global-token-mean", axes={"tp": dist.get_world_size()}, verify=True)
        if run_dir
        else contextlib.nullcontext()
    )
    with recorded:
        model = SplitModel(fault, residual)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            tokens, labels = batch(step)
            loss_of(model(tokens), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


class Gathered(torch.autograd.Function):
    """All ranks' rows forward; backward sums what ranks have for each row, and `averages` where that is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, averages: bool) -> Tensor:
        ctx.averages = averages
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        world = dist.get_world_size()
        own = grad.chunk(world)[dist.get_rank()]
        return own / world if ctx.averages else own, None


class KeysOfAll(nn.Module):
    """Attention of a rank's own queries over the keys and values of all ranks, as context parallelism has it."""

    def __init__(self, averages: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.averages = averages
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rows = x.reshape(-1, WIDTH)
        value = Gathered.apply(self.value(rows), self.averages)
        weights = F.softmax(self.query(rows) @ Gathered.apply(rows, False).t(), dim=-1)
        return self.head((weights @ value).view_as(x) + x)


def context_parallel_by_hand(averages: bool, run_dir: str) -> None:
    """Two steps with tokens of its own on every rank; gradients are summed, losses divided by all tokens."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir, objective="global-token-mean", axes={"cp": dist.get_world_size()}, verify=True):
        model = KeysOfAll(averages)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            tokens, labels = batch(2 * step + dist.get_rank())
            (loss_of(model(tokens), labels) / dist.get_world_size()).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def hooks_behind_an_average(factors: tuple[float, float, float], run_dir: str) -> None:
    """DDP, each rank's tokens over those of all; hooks multiply the head's gradients, the others', and that of the
    output by `factors`."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir, objective="global-token-mean", verify=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCAB))
        for name, param in model.named_parameters():
            param.register_hook(lambda grad, factor=factors[name[0] != "3"]: factor * grad)
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            tokens, labels = batch(step, dist.get_rank())
            logits = wrapped(tokens)
            logits.register_hook(lambda grad: factors[2] * grad)
            (loss_of(logits, labels) / dist.get_world_size()).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
