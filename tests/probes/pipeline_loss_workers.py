"""Two pipeline stages on two ranks whose loss counts no tokens, by torch's schedule, for test_pipeline_losses.py."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICROBATCHES, ROWS, WIDTH, STEPS = 4, 2, 8, 2
VARIANTS = (
    "divided by the schedule",
    "divided in the loss",
    "divided by nobody",
    "halved on the first stage",
    "accumulated",
    "accumulated, divided by the schedule",
    "accumulated, undivided",
)


def train(variant: str) -> int:
    """Two steps; returns a checksum of the parameters."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    num_windows = 2 if "accumulated" in variant else 1
    by_schedule = variant.endswith("by the schedule") or "halved" in variant
    divisor = (1 if by_schedule or "by nobody" in variant else MICROBATCHES) * (
        1 if "undivided" in variant else num_windows
    )

    def loss(output: Tensor, target: Tensor) -> Tensor:
        mean = F.mse_loss(output, target)
        return mean if divisor == 1 else mean / divisor

    edge = PipelineStage(stage, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(edge, MICROBATCHES, loss_fn=loss, scale_grads=by_schedule)
    data = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        for _ in range(num_windows):
            inputs, targets = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=data)
            schedule.step(inputs) if rank == 0 else schedule.step(target=targets)
        if "halved" in variant and rank == 0:
            for param in stage.parameters():
                param.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in stage.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    """Every variant without probes and with them; checksums of both."""
    return with_and_without(train, VARIANTS, folder)
