"""Two pipeline stages on two ranks whose loss counts no tokens, by torch's schedule, for test_pipeline_losses.py."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

MICROBATCHES, ROWS, WIDTH, STEPS = 4, 2, 8, 2
VARIANTS = (
    "divided by the schedule",
    "divided in the loss",
    "divided by nobody",
    "halved on the first stage",
    "accumulated",
    "accumulated, divided by the schedule",
    "accumulated, undivided",
    "all forwards first",
    "all forwards first, divided by nobody",
    "zero bubble",
    "zero bubble, divided by nobody",
    "zero bubble in a V",
)


def schedule_of(variant: str, stages: list[nn.Module], places: list[int], **options: Any) -> Any:
    edges = [PipelineStage(*one, 2 * len(stages), torch.device("cpu")) for one in zip(stages, places, strict=True)]
    if "zero bubble" in variant:
        kind = ScheduleZBVZeroBubble if variant.endswith("in a V") else ScheduleInterleavedZeroBubble
        return kind(list(edges), MICROBATCHES, **options)
    return (ScheduleGPipe if "forwards first" in variant else Schedule1F1B)(edges[0], MICROBATCHES, **options)


def train(variant: str) -> int:
    """Two steps; returns a checksum of the parameters."""
    rank = dist.get_rank()
    places = [rank]
    if "zero bubble" in variant:
        places = [rank, 3 - rank if variant.endswith("in a V") else rank + 2]
    torch.manual_seed(rank)
    stages: list[nn.Module] = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in places
    ]
    params = [param for stage in stages for param in stage.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    num_windows = 2 if "accumulated" in variant else 1
    by_schedule = variant.endswith("by the schedule") or "halved" in variant
    divisor = (1 if by_schedule or "by nobody" in variant else MICROBATCHES) * (
        1 if "undivided" in variant else num_windows
    )

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = F.mse_loss(output, target)
        return mean if divisor == 1 else mean / divisor

    schedule = schedule_of(variant, stages, places, loss_fn=loss, scale_grads=by_schedule)
    has_loss = 2 * len(places) - 1 in places
    data = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for _ in range(num_windows):
            inputs, targets = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=data)
            given = [inputs] if rank == 0 else []
            schedule.step(*given, **({"target": targets, "losses": []} if has_loss else {}))
        if "halved" in variant and rank == 0:
            for param in params:
                assert param.grad is not None
                param.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in params))


def train_all(folder: str) -> list[tuple[int, int]]:
    """Every variant without probes and with them; checksums of both."""
    return with_and_without(train, VARIANTS, folder)
