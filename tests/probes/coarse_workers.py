"""Copies of gradients that ranks gather in a coarser type and add up themselves, for test_sent_coarser.py."""

from pathlib import Path

import torch
import torch.distributed as dist
from probe_workers import Net, batch, token_sum
from torch import Tensor

from gradcheck_dist.probes import attach

VARIANTS = ("right", "half", "right, swapped", "noise", "elements lost")


def put_together(grad: Tensor, variant: str, dtype: torch.dtype) -> Tensor:
    sent = grad.to(dtype)
    if "swapped" in variant:
        parts = torch.zeros(-(-sent.numel() // 2) * 2, dtype=dtype)
        parts[: sent.numel()] = sent.flatten()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        mine = received.float().view(2, -1).sum(0)
        whole = torch.empty(2 * mine.numel())
        dist.all_gather_into_tensor(whole, mine)
        return whole[: sent.numel()].view_as(grad)
    copies = [torch.empty_like(sent) for _ in range(2)]
    dist.all_gather(copies, sent)
    return torch.stack([copy.float() for copy in copies]).sum(0)


def change(total: Tensor, variant: str) -> Tensor:
    """What a trainer does besides; noise and lost elements are alike on both ranks."""
    generator = torch.Generator().manual_seed(total.numel())
    if variant == "noise":
        return total + 0.01 * total.abs().mean() * torch.randn(total.shape, generator=generator)
    if variant == "elements lost":
        return total * (torch.rand(total.shape, generator=generator) < 0.9)
    return total / 2 if variant == "half" else total


def run(dtype: str, folder: str) -> None:
    dist.init_process_group("gloo")
    for variant in VARIANTS:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(Path(folder) / variant, objective="global-token-mean"):
            for step in range(2):
                data = [batch(dist.get_rank(), 2 * step + k) for k in range(2)]
                tokens = torch.tensor(float(sum(int((labels >= 0).sum()) for _, labels in data)))
                dist.all_reduce(tokens)
                for part in data:
                    (token_sum(model, part) / tokens).backward()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad = change(put_together(param.grad, variant, getattr(torch, dtype)), variant)
                optimizer.step()
                optimizer.zero_grad()
            dist.barrier()
    dist.destroy_process_group()
