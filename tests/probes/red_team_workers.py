"""Two ranks of trainers as people write them, for test_red_team_ranks.py."""

import contextlib
import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, token_sum
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ACCUMULATION = 2, 2


def flat_reduce(model: nn.Module, divisor: float, before: bool = False, written: bool = True) -> None:
    """One buffer for all gradients, as many hand-written trainers do. `before`: divided before it is reduced.
    `written`: and copied back behind that."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    buffer = torch.cat([grad.flatten() for grad in grads])
    if before:
        buffer.div_(divisor)
    dist.all_reduce(buffer)
    if not before:
        buffer /= divisor
    for grad, part in zip(grads, buffer.split([grad.numel() for grad in grads]), strict=True) if written else ():
        grad.copy_(part.view_as(grad))


def gather(model: nn.Module, only_first: bool) -> None:
    """Gradients of all ranks gathered and averaged; or the first rank's taken by all of them."""
    for param in model.parameters():
        assert param.grad is not None
        found = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(found, param.grad)
        param.grad = found[0] if only_first else torch.stack(found).mean(0)


def reduce_in_hook(grad: Tensor) -> Tensor:
    whole = grad.clone()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


class Overlapped:
    """Reduces each gradient as soon as a pass has accumulated it, while that pass goes on."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.on = False
        self.works: list[Any] = []
        for param in params:
            param.register_post_accumulate_grad_hook(self.reduce)
        self.params = params

    def reduce(self, param: Tensor) -> None:
        if self.on and param.grad is not None:
            param.grad.div_(dist.get_world_size())
            self.works.append(dist.all_reduce(param.grad, async_op=True))

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class OverlappedBuffers(Overlapped):
    """The same with a `main_grad` in place of `.grad` until the optimizer reads it, reduced `times` times."""

    def __init__(self, params: list[nn.Parameter], times: int) -> None:
        super().__init__(params)
        self.times = times
        for param in params:
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]

    def reduce(self, param: Any) -> None:
        param.main_grad.add_(param.grad)
        param.grad = None
        if self.on:
            param.main_grad.div_(dist.get_world_size())
            for _ in range(self.times):
                dist.all_reduce(param.main_grad)

    def wait(self) -> None:
        for param in self.params:
            param.grad, param.main_grad = param.main_grad, torch.zeros_like(param)  # type: ignore[attr-defined]


def wrapped(variant: str) -> Any:
    model = Net()
    if variant == "distilled" or variant == "halved later":
        return DistributedDataParallel(model)
    if variant == "hooks":
        for param in model.parameters():
            param.register_hook(reduce_in_hook)
    elif variant == "composable, averaged twice":
        from torch.distributed._composable import replicate

        replicate(model)
    elif "squared" in variant:
        return DistributedDataParallel(model)
    return model


def distilled(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    soft = F.kl_div(logits.log_softmax(-1), torch.full_like(logits, 1 / 20), reduction="batchmean")
    return (0.5 * F.cross_entropy(logits, tokens.flatten()) + 0.5 * soft) / ACCUMULATION


def reduced_one_by_one(model: nn.Module, divide: bool) -> None:
    for param in model.parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        if divide:
            param.grad /= dist.get_world_size()


def loss_of(variant: str, model: Any, k: int, num_tokens: float, step: int) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    if variant == "distilled":
        return distilled(model, batch(rank, k)[0])
    if "squared" in variant:
        return model(batch(rank, k)[0]).pow(2).mean() / ACCUMULATION
    loss = token_sum(model, batch(rank, k)) / num_tokens
    if variant == "halved later":
        return loss * world / (2 if step else 1)
    return loss if "averaged twice" in variant else loss * world


def train(variant: str, run_dir: str | None) -> int:
    """Train two steps; returns a checksum of the parameters."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir) if run_dir else contextlib.nullcontext():
        model = wrapped(variant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        params = list(model.parameters()) if "overlapped" in variant else []
        overlapped = Overlapped([] if "main_grad" in variant else params[1:] if "left out" in variant else params)
        if "main_grad" in variant:
            overlapped = OverlappedBuffers(params, 2 if "twice" in variant else 1)
        # Where ranks and passes are as many, which of both a line divides by is not known.
        accumulation = 3 if "divided before" in variant else ACCUMULATION
        valid = sum(int((batch(dist.get_rank(), k)[1] >= 0).sum()) for k in range(accumulation))
        total = torch.tensor(float(valid))
        dist.all_reduce(total)
        for step in range(STEPS):
            for k in range(accumulation):
                overlapped.on = k == accumulation - 1
                quiet = variant == "squared, never reduced" or ("squared" in variant and k < accumulation - 1)
                with model.no_sync() if quiet else contextlib.nullcontext():
                    loss_of(variant, model, k, total.item(), step).backward()
            overlapped.wait()
            if variant.startswith("flat"):
                divisor = dist.get_world_size() * (ACCUMULATION if "wrong" in variant else 1)
                flat_reduce(model, divisor, before="before" in variant, written="not written" not in variant)
                if "look" in variant:
                    flat_reduce(model, 1, written=False)
            if "rates on one rank" in variant and dist.get_rank() == 0:
                for rate, param in zip((0.35, 0.6), model.parameters(), strict=False):
                    param.grad.mul_(rate)
            if variant == "divided at first":
                reduced_one_by_one(model, divide=step == 0)
            if variant.startswith("gathered"):
                gather(model, "first" in variant)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))
