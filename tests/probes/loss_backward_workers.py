"""Cross-entropies of somebody's own, whose backward is right or wrong, for test_loss_backward.py."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.autograd import Function

WIDTH, CLASSES, STEPS, PASSES, Z = 8, 12, 3, 2, 1e-2
VARIANTS = (
    "vocabulary parallel",
    "vocabulary parallel, summed in backward",
    "vocabulary parallel, passed by",
    "vocabulary parallel, no mask",
    "vocabulary parallel, scaled in backward for a divided loss",
    "vocabulary parallel, own maximum",
    "vocabulary parallel, averaged denominator",
    "vocabulary parallel, backward by its own denominator",
    "vocabulary parallel, smoothed labels",
    "vocabulary parallel, z-loss",
    "vocabulary parallel, one sum",
    "vocabulary parallel, one sum, summed in backward",
    "vocabulary parallel, one sum, with a learned weight",
    "vocabulary parallel, one sum, smoothed",
    "vocabulary parallel, one sum, labels in one shard",
    "vocabulary parallel, one sum, labels in one shard, summed in backward",
    "vocabulary parallel, one sum, labels in one shard, another scale in the other",
)


def derivative(logits: Tensor, normaliser: Tensor, labels: Tensor, held: Tensor) -> Tensor:
    """softmax - onehot, of labels that are held."""
    gradient = (logits - normaliser[..., None]).exp()
    at = labels.clamp(0, logits.shape[-1] - 1)[..., None]
    return gradient.scatter_add(-1, at, -held.to(gradient.dtype)[..., None])


class Copy(Function):
    """Megatron-LM's f: hands on, and sums in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class VocabParallel(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, variant: str) -> Tensor:
        labels = labels - dist.get_rank() * logits.shape[-1]
        held = (labels >= 0) & (labels < logits.shape[-1])
        highest = logits.amax(-1)
        if "own maximum" not in variant:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        logits = logits - highest[..., None]
        picked = logits.gather(-1, labels.clamp(0, logits.shape[-1] - 1)[..., None]).squeeze(-1) * held
        total, mean = logits.exp().sum(-1), logits.mean(-1)
        own = total.log()
        for one in (total, picked, mean):
            dist.all_reduce(one)
        total = total / dist.get_world_size() if "averaged" in variant else total
        ctx.save_for_backward(logits, own if "its own" in variant else total.log(), labels, held)
        ctx.variant, ctx.shape, ctx.whole = variant, labels.shape, total.log() + highest
        losses = total.log() - picked
        losses = losses + 0.1 * (picked - mean / dist.get_world_size()) if "smoothed labels" in variant else losses
        losses = losses + Z * ctx.whole.square() if "z-loss" in variant else losses
        return losses.sum() if "one sum" in variant else losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        logits, normaliser, labels, held = ctx.saved_tensors
        grad = grad.expand(ctx.shape)
        if "summed" in ctx.variant:
            grad = grad.clone()
            dist.all_reduce(grad)
        elif "scaled" in ctx.variant:
            grad = grad * dist.get_world_size()
        elif "passed by" in ctx.variant:
            grad = torch.ones_like(grad)
        held = torch.ones_like(held) if "no mask" in ctx.variant else held
        if "another scale" in ctx.variant:
            grad = grad * (1 + dist.get_rank())
        gradient = derivative(logits, normaliser, labels, held)
        softmax = derivative(logits, normaliser, labels, held & False)
        if "smoothed" in ctx.variant:
            gradient = gradient - 0.1 * (1 / CLASSES + gradient - softmax)
        if "z-loss" in ctx.variant:
            gradient = gradient + 2 * Z * ctx.whole[..., None] * softmax
        return gradient * grad[..., None], None, None


def train(variant: str) -> int:
    """Three steps of two passes on two tensor-parallel ranks; returns a checksum of the parameters."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    torch.manual_seed(1 + dist.get_rank())
    model = nn.ModuleDict({"body": body, "head": nn.Linear(WIDTH, CLASSES // dist.get_world_size(), bias=False)})
    learned = torch.full((), 0.3, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), learned], lr=0.1)
    data = torch.Generator().manual_seed(3)
    used = CLASSES // 2 if "in one shard" in variant else CLASSES
    for _ in range(STEPS):
        batches = [torch.randint(used, (2, 3, size), generator=data) for size in (5, 8)]
        num_tokens = sum(words[1].numel() for words in batches)
        for words, labels in batches:
            logits = model["head"](Copy.apply(model["body"](words)))
            loss = VocabParallel.apply(logits, labels, variant).sum() / num_tokens
            loss = loss * learned if "learned" in variant else loss
            (loss / dist.get_world_size() if "divided" in variant else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    """Every variant without probes and with them; checksums of both."""
    return with_and_without(train, VARIANTS, folder)
