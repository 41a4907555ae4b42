"""Two pipeline stages on two ranks, by hand and by torch's schedule, for test_stage_edges.py."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, WORDS, MICROBATCHES, ROWS, LENGTH, STEPS = 16, 32, 3, 2, 24, 2
TOKENS = MICROBATCHES * ROWS * LENGTH
VARIANTS = (
    "by hand",
    "by hand, halved before it is sent",
    "by hand, let go",
    "by hand, let go, halved before it is sent",
    "by hand, by its edge",
    "by hand, by its edge, halved before it is sent",
    "by hand, rounded on the way",
    "by hand, one buffer",
    "by hand, one buffer never emptied",
    "by hand, signs only",
    "by hand, the first one again",
    "by hand, a skip beside",
    "by hand, a skip beside, halved before it is sent",
    "by hand, a skip beside, halved on one edge",
    "by hand, a skip beside, exchanged",
    "by hand, a skip beside, emptied",
    "by hand, a skip beside, lost",
    "by hand, backward behind all forwards",
    "by hand, backward behind all forwards, in another order",
    "by hand, labels",
    "by hand, labels of the next microbatch",
    "schedule",
    "schedule, hook",
    "schedule, labels",
    "schedule, labels of the next microbatch",
)


class Stage(nn.Module):
    def __init__(self, index: int, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.scale = scale
        self.first = nn.Linear(WIDTH, WIDTH) if index else nn.Embedding(WORDS, WIDTH)
        self.last = nn.Linear(WIDTH, WORDS if index else WIDTH)

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.first(given)))
        if self.scale != 1 and output.requires_grad:
            output.register_hook(lambda grad: grad * self.scale)
        return output


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS


def let_go_backward(output: Tensor, grad: Tensor) -> None:
    """An output that was sent gives its memory back; torch's own backward would ask for its shape (Megatron-LM)."""
    output.data = torch.empty(1)
    Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(grad,),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def with_a_skip(stage: Stage, ids: Tensor, labels: Tensor, variant: str) -> None:
    """The first stage's embeddings are sent beside what it makes of them, and added behind the second one's layer."""
    edges = torch.empty(2, ROWS, LENGTH, WIDTH)
    for tokens, meant in zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        if dist.get_rank() == 0:
            skip = stage.first(tokens)
            output = stage.last(torch.tanh(skip))
            dist.send(torch.stack([output, skip]).detach(), 1)
            dist.recv(edges, 1)
            used = 1 if "lost" in variant else 2
            torch.autograd.backward([output, skip][:used], list(edges.unbind())[:used])
        else:
            dist.recv(edges, 0)
            given, skip = (edge.clone().requires_grad_() for edge in edges)
            loss_of(stage.last(torch.tanh(stage.first(given)) + skip), meant).backward()
            assert given.grad is not None and skip.grad is not None
            both = torch.stack([skip.grad, given.grad] if "exchanged" in variant else [given.grad, skip.grad])
            both[1:].mul_(0 if "emptied" in variant else 1)
            (both if "before" in variant else both[:1]).div_(2 if "halved" in variant else 1)
            dist.send(both, 0)


def behind_all_forwards(stage: Stage, ids: Tensor, labels: Tensor, variant: str) -> None:
    """GPipe's order: every microbatch's forward, then every one's backward."""
    outputs = []
    for tokens in ids.chunk(MICROBATCHES):
        given = tokens if dist.get_rank() == 0 else torch.empty(ROWS, LENGTH, WIDTH)
        if dist.get_rank():
            dist.recv(given, 0)
            given.requires_grad_()
        outputs.append((stage(given), given))
        if dist.get_rank() == 0:
            dist.send(outputs[-1][0].detach(), 1)
    for (output, given), meant in zip(outputs, labels.chunk(MICROBATCHES), strict=True):
        if dist.get_rank():
            loss_of(output, meant).backward()
            assert given.grad is not None
            dist.send(given.grad, 0)
    for output, _ in outputs[:: -1 if "another order" in variant else 1] if dist.get_rank() == 0 else ():
        edge = torch.empty(ROWS, LENGTH, WIDTH)
        dist.recv(edge, 1)
        output.backward(edge)


def by_hand(stage: Stage, ids: Tensor, labels: Tensor, variant: str) -> None:
    rank = dist.get_rank()
    edge = torch.empty(ROWS, LENGTH, WIDTH, dtype=torch.bfloat16 if "rounded" in variant else torch.float32)
    buffer = torch.empty(ROWS, LENGTH, WIDTH, requires_grad=True)
    firsts: list[Tensor] = []
    for tokens, meant in zip(ids.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
        if rank == 0:
            output = stage(tokens)
            dist.send(output.detach(), 1)
            dist.recv(edge, 1)
            if "signs" in variant:
                edge.sign_()
            if "again" in variant:
                firsts.append(edge.clone())
                edge.copy_(firsts[0] if len(firsts) == MICROBATCHES else edge)
            if "let go" in variant:
                let_go_backward(output, edge)
            elif "by its edge" in variant:  # as torch's stages do since 2.15
                place = get_gradient_edge(output)
                del output
                torch.autograd.backward([place], [edge])  # type: ignore[list-item]
            else:
                output.backward(edge.float())
        else:
            given = buffer if "buffer" in variant else torch.empty(ROWS, LENGTH, WIDTH)
            dist.recv(given.data, 0)
            given.requires_grad_()
            loss_of(stage(given), meant).backward()
            assert given.grad is not None
            dist.send((given.grad / 2 if "halved" in variant else given.grad).to(edge.dtype), 0)
            if "never emptied" not in variant:
                given.grad = None


def train(variant: str) -> int:
    """Two steps; returns a checksum of the parameters."""
    rank = dist.get_rank()
    stage = Stage(rank, 3.0 if "hook" in variant and rank == 0 else 1.0)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    if "schedule" in variant:
        edge = PipelineStage(stage, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(edge, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    data = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids, labels = torch.randint(WORDS, (2, MICROBATCHES * ROWS, LENGTH), generator=data)
        if "labels" in variant:
            labels = ids.roll((-1, -ROWS if "of the next" in variant else 0), (1, 0))
        if "schedule" in variant:
            schedule.step(ids) if rank == 0 else schedule.step(target=labels)
        elif "behind all" in variant:
            behind_all_forwards(stage, ids, labels, variant)
        elif "skip" in variant:
            with_a_skip(stage, ids, labels, variant)
        else:
            by_hand(stage, ids, labels, variant)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in stage.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    """Every variant without probes and with them; checksums of both."""
    return with_and_without(train, VARIANTS, folder)
