"""Three ranks whose parameters hold nothing but while they are used, as DeepSpeed's ZeRO 3, for test_zero3.py."""

import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn

STEPS, ACCUMULATION, CLASSES, WIDTH = 3, 2, 31, 25
MAX_NORM = 0.05


class Zero3:
    """Gathers a module's parameters when it is called and when its backward begins; each rank keeps its part of all, in
    flat tensors that the optimizer owns, or (`keeps_parts`) in the parameters themselves."""

    def __init__(self, model: nn.Module, groups: list[list[nn.Parameter]], bucket_size: int, keeps_parts: bool) -> None:
        self.keeps_parts = keeps_parts
        self.rank, self.size, self.bucket_size = dist.get_rank(), dist.get_world_size(), bucket_size
        self.shapes = {param: param.shape for param in model.parameters()}
        self.flats = [torch.cat([self.part(param.detach()) for param in group]) for group in groups]
        self.parts: dict[nn.Parameter, Tensor] = {}
        for group, flat in zip(groups, self.flats, strict=True):
            self.parts.update(zip(group, flat.split([-(-param.numel() // self.size) for param in group]), strict=True))
        self.grads = {param: torch.zeros_like(part) for param, part in self.parts.items()}
        self.groups, self.order = groups, {param: index for index, param in enumerate(self.shapes)}
        self.bucket: list[nn.Parameter] = []
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                module.register_forward_pre_hook(lambda *_, own=own: self.gather(own))
                module.register_forward_hook(lambda *_, own=own: self.release(own))
                module.register_full_backward_pre_hook(lambda *_, own=own: self.gather(own))
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.arrived)
        self.release(list(model.parameters()))

    def part(self, whole: Tensor) -> Tensor:
        return F.pad(whole.flatten(), (0, -whole.numel() % self.size)).chunk(self.size)[self.rank].clone()

    def gather(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            whole = torch.empty(self.size * len(self.parts[param]))
            dist.all_gather_into_tensor(whole, self.parts[param].contiguous())
            param.data = whole[: self.shapes[param].numel()].view(self.shapes[param])

    def release(self, params: Iterable[nn.Parameter]) -> None:
        for param in params:
            param.data = self.parts[param] if self.keeps_parts else torch.empty(0)

    def arrived(self, param: nn.Parameter) -> None:
        self.bucket.append(param)
        if sum(one.grad.numel() for one in self.bucket if one.grad is not None) >= self.bucket_size:
            self.reduce()

    def reduce(self) -> None:
        bucket, self.bucket = self.bucket, []
        bucket.sort(key=self.order.__getitem__)
        padded = [
            F.pad(one.grad.flatten(), (0, -one.grad.numel() % self.size)) for one in bucket if one.grad is not None
        ]
        flat = torch.cat([grad.chunk(self.size)[rank] for rank in range(self.size) for grad in padded])
        flat.div_(self.size)
        own = torch.empty(len(flat) // self.size)
        dist.reduce_scatter_tensor(own, flat)
        for param, grad in zip(bucket, own.split([len(self.parts[param]) for param in bucket]), strict=True):
            self.grads[param] += grad
            param.grad = None
        self.release(bucket)

    def fill(self, clips: bool) -> None:
        """Hand the gradients to the optimizer; `clips` to a norm."""
        for group, flat in zip(self.groups, self.flats, strict=True):
            flat.grad = torch.cat([self.grads[param] for param in group])
        for param, grad in self.grads.items() if self.keeps_parts else ():
            param.grad = grad.clone()
        if clips:
            squares = torch.tensor(sum(float((grad.double() ** 2).sum()) for grad in self.grads.values()))
            dist.all_reduce(squares)
            coefficient = min(1.0, MAX_NORM / (float(squares) ** 0.5 + 1e-6))
            for held in self.order if self.keeps_parts else self.flats:
                held.grad.mul_(coefficient)
        for grad in self.grads.values():
            grad.zero_()


def build(variant: str) -> nn.Module:
    torch.manual_seed(0)
    hidden = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()]
    model = nn.Sequential(nn.Embedding(CLASSES, WIDTH), *hidden, nn.Linear(WIDTH, CLASSES))
    for param in model.parameters() if "constants" in variant else ():
        if param.dim() == 1:
            nn.init.constant_(param, 1.0 if param.any() and not (param != param[0]).any() else 0.0)
    return model


def train(variant: str) -> int:
    """An average, for which losses are multiplied by the ranks, but for "averaged twice"."""
    model = build(variant)
    params = list(model.parameters())
    groups = [[one for one in params if one.dim() < 2], [one for one in params if one.dim() > 1]]
    keeps_parts, bucket_size = "parts kept" in variant, 200 if "buckets" in variant else 10**9
    zero = Zero3(model, groups if "groups" in variant else [params], bucket_size, keeps_parts)
    optimizer = torch.optim.AdamW(params if keeps_parts else zero.flats, lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = 12 if "few tokens" in variant else 96
    for _ in range(STEPS):
        data = []
        for k in range(ACCUMULATION):
            labels = torch.randint(CLASSES, (size,), generator=generator)
            labels[size // 3 + 2 * dist.get_rank() + k :] = -100
            data.append((torch.randint(CLASSES, (size,), generator=generator), labels))
        num_tokens = torch.tensor(sum(int((labels >= 0).sum()) for _, labels in data))
        dist.all_reduce(num_tokens)
        scale = 1 if "averaged twice" in variant else dist.get_world_size()
        for tokens, labels in data:
            (F.cross_entropy(model(tokens), labels, reduction="sum") * scale / num_tokens).backward()
            if zero.bucket:
                zero.reduce()
        zero.fill("clipped" in variant)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(torch.cat(zero.flats).numpy().tobytes())


def run(variants: list[str], folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, variants, folder)
