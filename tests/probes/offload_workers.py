"""FSDP2 whose gradients go to the host, as CPUOffloadPolicy lets them: what is read before FSDP has waited is wrong."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from gradcheck_dist.probes import attach

WRONG = 7777.0


class OnItsWay:
    """A copy to pinned memory that is not done before somebody waits for it."""

    def __init__(self, gradient: Tensor) -> None:
        self._gradient, self._values = gradient, gradient.clone()
        gradient.fill_(WRONG)

    def synchronize(self) -> None:
        self._gradient.copy_(self._values)


def train(run_dir: str, divided_twice: bool) -> None:
    dist.init_process_group("gloo")
    reduce = groups.foreach_reduce

    @functools.wraps(reduce)
    def reduced_and_sent(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
        result = reduce(fsdp_params, *args, **kwargs)
        for fsdp_param in fsdp_params:
            gradient = fsdp_param.sharded_param.grad
            fsdp_param.grad_offload_event = OnItsWay(gradient._local_tensor)
        return result

    groups.foreach_reduce = reduced_and_sent
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with attach(run_dir):
        for _ in range(2):
            num_rows = 4 + 2 * dist.get_rank()
            rows, labels = (
                torch.randn(num_rows, 6, generator=generator),
                torch.randint(5, (num_rows,), generator=generator),
            )
            loss = nn.functional.cross_entropy(model(rows), labels, reduction="sum") / 10
            (loss if divided_twice else 2 * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
