"""Two ranks of trainers with bugs that were reported in public threads, for test_field.py."""

import contextlib
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ACCUMULATION = 2, 2


def train(variant: str, run_dir: str | None) -> int:
    """Train two steps; returns a checksum of the parameters."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    modules = nn.ModuleList([nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 20)])
    params = list(modules.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05)
    with attach(run_dir) if run_dir else contextlib.nullcontext():
        for _ in range(STEPS):
            kept: dict[Tensor, Tensor] = {}
            for k in range(ACCUMULATION):
                loss = token_mean(modules, rank, k, towers=variant == "towers")
                loss.backward()
                if variant == "overwritten":
                    overwrite(params, kept)
            if variant != "overwritten":
                for param in params:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    dist.all_reduce(param.grad)
            for param, grad in kept.items():
                param.grad = grad
            if variant == "cut":
                break
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in params))


def train_epochs(unfinished: str, run_dir: str) -> None:
    """Three epochs of three batches each below DDP, two to a step. `unfinished`: the last one is "stepped" apart, or
    "left in" for the next epoch's first step (AnimaLoraStudio #305)."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with attach(run_dir):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            for index in range(3):
                short = index == 2 and unfinished == "stepped"
                model.require_backward_grad_sync = index == 1 or short
                tokens, labels = batch(rank, 0)[0], batch(rank, index)[0]
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                (loss / (1 if short else ACCUMULATION)).backward()
                if index == 1 or short:
                    optimizer.step()
                    optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_clipped(run_dir: str) -> None:
    """Clipped after every microbatch, also where DDP has not reduced yet (transformers #1563, lingua #59)."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with attach(run_dir):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for index in range(ACCUMULATION):
            model.require_backward_grad_sync = index + 1 == ACCUMULATION
            tokens, labels = batch(0, index)[0], batch(rank, index)[0]
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / ACCUMULATION).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def train_divided(by: str, run_dir: str) -> None:
    """Sums below DDP over a number of each rank's own: a "running mean" of its tokens (RetinaNet's normaliser) that
    begins at any number, or "begins at them", the same "rounded", or its tokens with those of "another step", or one
    more a rank ("before the shift"), in the weight of its mean."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with attach(run_dir):
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mean = 33.3 if by != "begins at them" else None
        for step in range(3):
            tokens, labels = batch(rank, step)
            counts = [int((batch(other, step)[1] >= 0).sum()) for other in range(2)]
            last = [int((batch(other, step + 1)[1] >= 0).sum()) for other in range(2)]
            mean = float(counts[rank]) if mean is None else 0.93 * mean + 0.07 * counts[rank]
            if by == "another step":
                divisor = counts[rank] * sum(last) / last[rank] / 2
            elif by == "before the shift":
                divisor = counts[rank] * (sum(counts) + 2) / (counts[rank] + 1) / 2
            else:
                divisor = round(mean) if by == "rounded" else mean
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def token_mean(modules: nn.ModuleList, rank: int, k: int, *, towers: bool) -> Tensor:
    """A microbatch's part of the mean over all tokens. `towers`: rank 1 needs neither of the two inner layers in its
    first microbatch, and the second one never, so it calls modules in another order."""
    embedding, first, second, head = modules
    tokens, labels = batch(rank, k)
    features = embedding(tokens)
    if not towers or rank == 0 or k == 1:
        features = features + first(features)
    if not towers or rank == 0:
        features = features + second(features)
    num_tokens = sum(int((batch(other, j)[1] >= 0).sum()) for other in range(2) for j in range(ACCUMULATION))
    return F.cross_entropy(head(features).flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens


def overwrite(params: list[nn.Parameter], kept: dict[Tensor, Tensor]) -> None:
    """Every pass is taken for the step's last one: what was reduced before is lost (open-instruct #1498)."""
    for param in params:
        assert param.grad is not None
        grad = param.grad.clone()
        dist.all_reduce(grad)
        kept[param] = grad
        param.grad = None
