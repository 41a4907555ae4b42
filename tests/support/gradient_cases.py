"""Lists of gradients on which every way of computing statistics must agree with the definition."""

from __future__ import annotations

import torch
from torch import Tensor

LENGTHS = (0, 1, 2, 3, 63, 64, 255, 257, 1023, 4095, 4096, 4097, 5000, 66_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def odd_lengths(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Ordinary values at lengths around the boundaries of rows, blocks and chunks, some exact zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in LENGTHS:
        values = torch.randn(length, generator=generator)
        values[::7] = 0.0
        values[1::11] = -0.0
        found.append(values.to(dtype))
    return found


def planted(dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    """NaN and both infinities at the first, the last and inner places; one tensor of nothing else."""
    found = odd_lengths(dtype, seed)
    for tensor in found:
        if len(tensor):
            tensor[0] = float("nan")
            tensor[-1] = float("inf")
            tensor[len(tensor) // 2] = -float("inf")
    found.append(torch.full((130,), float("nan"), dtype=dtype))
    return found


def laid_out(dtype: torch.dtype, seed: int = 2) -> list[Tensor]:
    """Shapes and strides: a scalar, transposed, sliced, expanded and permuted tensors, and one whose data have the
    other sign."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(70, 130, generator=generator).to(dtype)
    cube = torch.randn(5, 7, 190, generator=generator).to(dtype)
    return [
        torch.randn((), generator=generator).to(dtype),
        base,
        base.t(),
        base[:, ::2],
        base[3:, 1:-1],
        base[:1].expand(60, 130),
        cube.permute(2, 0, 1),
        cube[:, :0],
        base.flatten()[1:5001],
        torch._neg_view(base),
    ]


def extreme(seed: int = 3) -> list[Tensor]:
    """Magnitudes whose squares leave float32, alone and beside ordinary ones."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6000, generator=generator)
    mixed = base.clone()
    mixed[17], mixed[4500] = 3e30, -2e-30
    # The last holds the smallest normal numbers: subnormal ones count as zero on devices that flush them.
    return [base * 1e-30, base * 1e25, base * 1e-18, mixed, base[:40] * 1e-35, torch.full((5000,), 1.2e-38)]


def references_of(tensors: list[Tensor], seed: int = 4) -> list[Tensor]:
    """One partner a tensor, correlated with it, of another memory layout than a strided one."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tensor in tensors:
        noise = torch.randn(tensor.shape, generator=generator)
        clean = torch.nan_to_num(tensor.float(), nan=1.0, posinf=2.0, neginf=3.0)
        found.append((clean * 0.5 + noise * clean.abs().clamp(max=1.0)).to(tensor.dtype))
    return found


def positions_of(tensors: list[Tensor], seed: int = 5) -> list[Tensor | None]:
    """Up to 96 flat positions of each tensor, the last one among them; none for every fifth."""
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor | None] = []
    for index, tensor in enumerate(tensors):
        if index % 5 == 4:
            found.append(None)
            continue
        count = tensor.numel()
        where = torch.randperm(count, generator=generator)[:95].sort().values
        found.append(torch.cat([where, torch.tensor([count - 1])]) if count else where)
    return found
