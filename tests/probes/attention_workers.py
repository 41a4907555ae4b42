"""Two ranks whose attention goes over both ranks' sequences in one function, for test_attention.py."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.autograd import Function

WIDTH, WORDS, HEADS, LENGTH, STEPS, PASSES = 16, 16, 2, 12, 2, 2
VARIANTS = (
    "ring",
    "ring, bfloat16",
    "ring, not sent back",
    "ring, keys and values divided",
    "ring, sends and receives",
    "ring, sends at once, divided",
    "gathered",
    "gathered, not summed",
    "gathered, keys not summed",
    "gathered, bfloat16",
    "delta rule",
)


def passed_on(tensor: Tensor, variant: str) -> Tensor:
    """To the next rank, from the last one."""
    tensor = tensor.contiguous()
    other, got = 1 - dist.get_rank(), torch.empty_like(tensor)
    if "sends and receives" in variant:
        for sender in (0, 1):
            if dist.get_rank() == sender:
                dist.send(tensor, other)
            else:
                dist.recv(got, other)
        return got
    if "sends at once" in variant:
        works = [dist.isend(tensor, other), dist.irecv(got, other)]
        for work in works:
            work.wait()
        return got
    operations = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got


def from_all(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, 2)


class Ring(Function):
    """Blocks of keys and values go around, and their gradients with them."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, variant: str) -> Tensor:
        blocks, one, other = [], keys, values
        for _ in range(2):
            blocks.append((one, other))
            one, other = passed_on(one, variant), passed_on(other, variant)
        scores = torch.cat([queries @ one.transpose(-1, -2) for one, _ in blocks], -1) / queries.shape[-1] ** 0.5
        shares = scores.softmax(-1)
        ctx.save_for_backward(queries, keys, values, shares)
        ctx.variant = variant
        return shares @ torch.cat([other for _, other in blocks], -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        queries, keys, values, shares = ctx.saved_tensors
        variant, scale = ctx.variant, queries.shape[-1] ** -0.5
        one, other, own = keys, values, (grad @ (values.transpose(-1, -2)))
        blocks = [own]
        far_keys, far_values = passed_on(keys, variant), passed_on(values, variant)
        blocks.append(grad @ far_values.transpose(-1, -2))
        of_shares = torch.cat(blocks, -1)
        of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True)) * scale
        of_queries = of_scores @ torch.cat([one, far_keys], -2)
        of_keys, of_values = of_scores.transpose(-1, -2) @ queries, shares.transpose(-1, -2) @ grad
        length = other.shape[-2]
        mine, theirs = (
            (of_keys[..., :length, :], of_values[..., :length, :]),
            (
                of_keys[..., length:, :],
                of_values[..., length:, :],
            ),
        )
        if "not sent back" not in variant:
            theirs = (passed_on(theirs[0], variant), passed_on(theirs[1], variant))
        of_keys, of_values = (a + b for a, b in zip(mine, theirs, strict=True))
        if "divided" in variant:
            of_keys, of_values = of_keys / 2, of_values / 2
        return of_queries, of_keys, of_values, None


class Gathered(Function):
    """Keys and values of all ranks are gathered inside; torch differentiates the rest."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, variant: str) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        ctx.variant = variant
        with torch.enable_grad():
            ctx.whole = [one.detach().requires_grad_() for one in (queries, from_all(keys), from_all(values))]
            ctx.made = F.scaled_dot_product_attention(*ctx.whole)
        return ctx.made.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_queries, of_keys, of_values = torch.autograd.grad(ctx.made, ctx.whole, grad)
        if "not summed" not in ctx.variant:
            of_keys, of_values = of_keys.clone(), of_values.clone()
            dist.all_reduce(of_keys)
        if ", not summed" not in ctx.variant:
            dist.all_reduce(of_values)
        first = dist.get_rank() * grad.shape[2]
        return of_queries, *(one.narrow(2, first, grad.shape[2]) for one in (of_keys, of_values)), None


class DeltaRule(Function):
    """Linear attention that forgets along a key before it writes: no attention, though it has queries, keys and values.
    Every rank works on its own sequence; one collective makes it a function of several ranks."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, variant: str) -> Tensor:
        dist.all_reduce(torch.zeros(1))
        with torch.enable_grad():
            ctx.whole = [one.detach().requires_grad_() for one in (queries, keys, values)]
            state, made = torch.zeros(*keys.shape[:2], keys.shape[-1], values.shape[-1]), []
            for t in range(keys.shape[2]):
                key, value = ctx.whole[1][:, :, t, :, None], ctx.whole[2][:, :, t, None]
                state = state - 0.3 * key @ (key.transpose(-1, -2) @ state) + key @ value
                made.append(ctx.whole[0][:, :, t, None] @ state)
            ctx.made = torch.cat(made, 2)
        return ctx.made.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *torch.autograd.grad(ctx.made, ctx.whole, grad), None


class Model(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.to(("bfloat16" in variant and torch.bfloat16) or torch.float32)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        of_heads = self.project(h).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        kind = DeltaRule if "delta" in self.variant else Gathered if "gathered" in self.variant else Ring
        logits: Tensor = self.head(h + kind.apply(*of_heads, self.variant).transpose(1, 2).flatten(2))
        return logits


def train(variant: str) -> int:
    """Two steps of two passes; returns a checksum of the parameters."""
    model = Model(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(3 + dist.get_rank())
    for _ in range(STEPS):
        for _ in range(PASSES):
            ids = torch.randint(WORDS, (2, LENGTH + 1), generator=data)
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            (loss / (2 * 2 * PASSES * LENGTH)).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().float().numpy().tobytes() for param in model.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    """Every variant without probes and with them; checksums of both."""
    return with_and_without(train, VARIANTS, folder)
