"""Two ranks that part a flat buffer in two, so that parameters lie on one of them each, for test_uneven_parts.py."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import with_and_without
from torch import Tensor, nn

STEPS, ACCUMULATION, CLASSES, WIDTH = 3, 2, 12, 8


class Flat:
    """All parameters of a model in one buffer, of which each rank keeps its half between steps: the first layer's, or
    the second layer's."""

    def __init__(self, model: nn.Module, *, keeps_shapes: bool) -> None:
        self.params = list(model.parameters())
        self.shapes = [param.shape for param in self.params]
        self.kept = self.shapes if keeps_shapes else [torch.Size([shape.numel()]) for shape in self.shapes]
        first, second = (sum(shape.numel() for shape in self.shapes[at : at + 2]) for at in (0, 2))
        self.size = max(first, second)
        self.offsets = [0, self.shapes[0].numel(), self.size, self.size + self.shapes[2].numel()]
        whole = torch.zeros(2 * self.size)
        for param, offset in zip(self.params, self.offsets, strict=True):
            whole[offset : offset + param.numel()] = param.detach().flatten()
        self.own = whole[dist.get_rank() * self.size :][: self.size].clone()
        self.grad = torch.zeros_like(self.own)
        self.parted()

    def gathered(self) -> Tensor:
        """Makes parameters whole; gives the buffer that their gradients lie in."""
        whole, grads = torch.empty(2 * self.size), torch.zeros(2 * self.size)
        dist.all_gather_into_tensor(whole, self.own)
        for param, shape, offset in zip(self.params, self.shapes, self.offsets, strict=True):
            param.data = whole[offset : offset + shape.numel()].view(shape)
            param.grad = grads[offset : offset + shape.numel()].view(shape)
        return grads

    def reduced(self, grads: Tensor) -> None:
        first = dist.get_rank() * self.size
        grads[first : first + self.size] += self.grad
        dist.reduce_scatter_tensor(self.grad, grads)
        self.parted()

    def parted(self) -> None:
        for index, (param, shape) in enumerate(zip(self.params, self.shapes, strict=True)):
            mine = index // 2 == dist.get_rank()
            begin = self.offsets[index] % self.size
            kept = self.kept[index]
            param.data = self.own[begin : begin + shape.numel()].view(kept) if mine else torch.tensor([])
            param.grad = self.grad[begin : begin + shape.numel()].view(kept) if mine else None


def train(variant: str) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    generator = torch.Generator().manual_seed(dist.get_rank())
    flat = Flat(model, keeps_shapes=variant != "flattened")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        flat.grad.zero_()
        for _ in range(ACCUMULATION):
            features, labels = torch.randn(9, 6, generator=generator), torch.randint(CLASSES, (9,), generator=generator)
            grads = flat.gathered()
            divisor = ACCUMULATION * (1 if variant == "summed" else 2)
            (F.cross_entropy(model(features), labels) / divisor).backward()
            flat.reduced(grads)
        optimizer.step()
    return zlib.crc32(flat.own.numpy().tobytes())


def run(variants: list[str], folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, variants, folder)
