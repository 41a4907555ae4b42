"""Ranks of a hand-made trainer in the style of large frameworks, for test_framework_style.py."""

import zlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.autograd.variable import Variable

STEPS, ACCUMULATION, CLASSES = 3, 3, 11


class TokenLosses(torch.autograd.Function):
    """Cross-entropy as one number a label, as a vocabulary-parallel one gives it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = logits - logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(log_probs, labels)
        return -log_probs.gather(-1, labels[..., None]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        log_probs, labels = ctx.saved_tensors
        wanted = torch.nn.functional.one_hot(labels, log_probs.shape[-1])
        return (log_probs.exp() - wanted) * grad[..., None], None


def backward_by_hand(loss: Tensor) -> None:
    """As Megatron starts backward from an output whose memory it has given back."""
    Variable._execution_engine.run_backward(
        tensors=(loss,),
        grad_tensors=(torch.ones_like(loss),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def model_with_buffers(dtype: torch.dtype) -> nn.Module:
    """Parameters of which two are all ones and two all zeros, with float32 gradients beside them."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES)]
    model = nn.Sequential(*layers).to(dtype)
    for param in model.parameters():
        param.main_grad = torch.zeros(param.shape)  # type: ignore[attr-defined]
    return model


def own_part(param: Tensor) -> slice:
    """What of a flat parameter this rank steps: its ends lie within the parameter."""
    size = -(-param.numel() // dist.get_world_size())
    return slice(dist.get_rank() * size, min((dist.get_rank() + 1) * size, param.numel()))


def train(variant: str) -> int:
    """Variants: "right", "mean" (each microbatch is divided by its own tokens too), "own tokens" (each rank divides
    by the tokens of its own), "mean of sums, own tokens" (and makes up for a division by passes), "coalesced" (all
    buffers are reduced at once), "coalesced twice"."""
    exact = "own tokens" in variant or "coalesced" in variant
    dtype = torch.float32 if exact else torch.bfloat16  # own tokens are lost in bfloat16's noise
    passes = ACCUMULATION if "mean of sums" in variant else 1
    model = model_with_buffers(dtype)
    params: list[Any] = list(model.parameters())[::-1]  # not in the order in which the model shows them
    shards = [param.detach().flatten()[own_part(param)].float().clone() for param in params]
    optimizer = torch.optim.SGD(shards, lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        for param in params:
            param.main_grad.zero_()
        num_tokens = torch.zeros(())
        for _ in range(ACCUMULATION):
            features, labels = torch.randn(9, 8, generator=generator), torch.randint(CLASSES, (9,), generator=generator)
            length = int(torch.randint(2, 6, (), generator=generator)) + 3 * dist.get_rank()
            mask = (torch.arange(9) < length).float()
            losses = TokenLosses.apply(model(features.to(dtype)).float(), labels)
            loss = (losses * mask).sum()
            backward_by_hand(loss / mask.sum() if variant == "mean" else loss / passes)
            num_tokens += mask.sum()
            for param in params:
                param.main_grad.add_(param.grad.float())
                param.grad = None
        if "own tokens" not in variant:
            dist.all_reduce(num_tokens)
        for _ in range(2 if "twice" in variant else 1):
            with dist._coalescing_manager() if "coalesced" in variant else nullcontext():
                for param in params:
                    dist.all_reduce(param.main_grad)
        for param, shard in zip(params, shards, strict=True):
            param.main_grad.mul_(passes / num_tokens)
            shard.grad = param.main_grad.flatten()[own_part(param)]
        optimizer.step()
        for param, shard in zip(params, shards, strict=True):
            parts = [torch.empty_like(param).flatten()[:0] for _ in range(dist.get_world_size())]
            dist.all_gather_object(parts, shard.detach())
            param.data.copy_(torch.cat(parts).view_as(param))
    return zlib.crc32(torch.cat([param.detach().float().flatten() for param in params]).numpy().tobytes())


class Shared(torch.optim.Optimizer):
    """Lists all parameters; each rank steps every second one, and gives it to the others."""

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {})
        rank, world = dist.get_rank(), dist.get_world_size()
        self.owner = {param: index % world for index, param in enumerate(params)}
        self.inner = torch.optim.SGD([param for param in params if self.owner[param] == rank], lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        for param, owner in self.owner.items():
            dist.broadcast(param.data, owner)


def train_shared(variant: str) -> int:
    """Each gradient is reduced to the rank that steps its parameter, in a hook, and dropped on all others. Variants:
    "shared", "kept" (it is not dropped), "shared, averaged twice"."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = Shared(list(model.parameters()))
    world, last = dist.get_world_size(), False

    def reduce(param: Tensor) -> None:
        if last and param.grad is not None:
            param.grad.div_(world)
            dist.reduce(param.grad, optimizer.owner[param])
            if variant != "kept" and optimizer.owner[param] != dist.get_rank():
                param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(reduce)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        for k in range(ACCUMULATION):
            last = k == ACCUMULATION - 1
            labels = torch.randint(CLASSES, (9,), generator=generator)
            losses = TokenLosses.apply(model(torch.randn(9, 8, generator=generator)), labels)
            (losses.sum() / (9 * ACCUMULATION * (world if variant == "shared, averaged twice" else 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(torch.cat([param.detach().flatten() for param in model.parameters()]).numpy().tobytes())


def run_shared(variants: list[str], folder: str) -> list[tuple[int, int]]:
    return with_and_without(train_shared, variants, folder)


def run(variants: list[str], folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, variants, folder)
