"""Pipelines by hand whose ranks run several stages each, and one of four ranks, for test_chunks_by_hand.py."""

import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn

WIDTH, WORDS, MICROBATCHES, ROWS, LENGTH, STEPS = 16, 32, 3, 2, 8, 2
TOKENS = MICROBATCHES * ROWS * LENGTH
ROUND = (
    "in a ring",
    "in a ring, a chunk halved",
    "in a ring, divided again",
    "in a ring, halved on the way",
    "in a ring, halved on the way, with a term",
    "in a V",
)
IN_LINE = ("in line", "in line, a stage halved", "in line, weights twice", "in line, a pass lost")


class Stage(nn.Module):
    """Biases and norms begin alike on all stages."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first = nn.Linear(WIDTH, WIDTH) if index else nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WORDS if index == num_stages - 1 else WIDTH)
        nn.init.zeros_(self.last.bias)

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = self.last(self.norm(torch.tanh(self.first(given))))
        return output


def home(stage: int, variant: str) -> int:
    """The rank that runs a stage."""
    if "in line" in variant:
        return stage
    return (0, 1, 1, 0)[stage] if "V" in variant else stage % 2


def train(variant: str) -> int:
    """Two steps, all forward passes of a stage before the next stage's; returns a checksum of the parameters."""
    rank, num_stages = dist.get_rank(), 4
    stages = {index: Stage(index, num_stages) for index in range(num_stages) if home(index, variant) == rank}
    optimizer = torch.optim.SGD([p for stage in stages.values() for p in stage.parameters()], lr=0.1)
    data = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids, labels = torch.randint(WORDS, (2, MICROBATCHES, ROWS, LENGTH), generator=data)
        run(stages, ids, labels, variant)
        if ("a chunk halved" in variant and rank == 0) or ("a stage halved" in variant and rank == 2):
            for param in stages[max(stages)].parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for stage in stages.values() for p in stage.parameters()))


def run(stages: dict[int, Stage], ids: Tensor, labels: Tensor, variant: str) -> None:
    """One step's forward and backward passes. What stays on a rank is queued."""
    queue: dict[int, deque[Tensor]] = {index: deque() for index in range(-1, 5)}
    sent: list[tuple[Any, Tensor]] = []
    given: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    for index, stage in stages.items():
        for microbatch in range(MICROBATCHES):
            came = ids[microbatch]
            if index:
                came = fetched(queue[index - 1], home(index - 1, variant)).requires_grad_()
            given[index, microbatch] = came
            output = outputs[index, microbatch] = stage(came)
            if index < 3:
                handed(output.detach(), queue[index], home(index + 1, variant), sent)
    for index in sorted(stages, reverse=True):
        for microbatch in range(MICROBATCHES):
            output = outputs[index, microbatch]
            if index == 3:
                loss = F.cross_entropy(output.flatten(0, 1), labels[microbatch].flatten(), reduction="sum") / TOKENS
                loss = loss + 0.01 * output.square().mean() / MICROBATCHES if "a term" in variant else loss
                (loss / MICROBATCHES if "divided again" in variant else loss).backward()
            else:
                twice = "weights twice" in variant and index == 1
                arrived = fetched(queue[index + 1], home(index + 1, variant))
                if "a pass lost" not in variant or (index, microbatch) != (0, 1):
                    output.backward(arrived, retain_graph=twice)
                if twice:
                    output.backward(arrived, inputs=list(stages[index].parameters()))
            grad = given[index, microbatch].grad
            if grad is not None:
                scale = 0.5 if "on the way" in variant and index == 2 else 1.0
                handed(grad * scale, queue[index], home(index - 1, variant), sent)
    for work, _ in sent:
        work.wait()


def handed(tensor: Tensor, queue: deque[Tensor], to: int, sent: list[tuple[Any, Tensor]]) -> None:
    if to == dist.get_rank():
        queue.append(tensor.clone())
    else:
        sent.append((dist.isend(tensor, to), tensor))


def fetched(queue: deque[Tensor], source: int) -> Tensor:
    if source == dist.get_rank():
        return queue.popleft()
    tensor = torch.empty(ROWS, LENGTH, WIDTH)
    dist.recv(tensor, source)
    return tensor


def train_round(folder: str) -> list[tuple[int, int]]:
    """Two stages a rank, on two ranks; without probes and with them."""
    return with_and_without(train, ROUND, folder)


def train_in_line(folder: str) -> list[tuple[int, int]]:
    """One stage a rank, on four ranks."""
    return with_and_without(train, IN_LINE, folder)
