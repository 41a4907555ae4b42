"""One rank of a composed trainer: recorded, and what its optimizers read is kept for the comparison."""

from __future__ import annotations

import os
import runpy

import torch
import torch.distributed as dist
from torch import Tensor, nn

Seen = list[tuple[int, dict[str, Tensor], dict[str, Tensor]]]
"""Of each step its number, the gradients and the parameters, by name, as this rank holds them."""


def train(folder: str) -> None:
    """Run `folder`/train.py as it stands, into `folder`/run and `folder`/seen.<rank>."""
    from gradcheck_dist.probes import attach

    seen: Seen = []

    def check(step: int, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        gradients = {name: _local(param.grad) for name, param in named.items() if param.grad is not None}
        seen.append((step, gradients, {name: _local(param) for name, param in named.items()}))

    with attach(f"{folder}/run", steps="0:3"):
        dist.init_process_group("gloo")
        runpy.run_path(f"{folder}/train.py", {"CHECK": check}, "__main__")
        dist.destroy_process_group()
    torch.save(seen, f"{folder}/seen.{os.environ['RANK']}")


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach().clone()
