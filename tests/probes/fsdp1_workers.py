"""Ranks of FSDP1 trainers as people write them, for test_fsdp1.py."""

import contextlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from parallel_workers import Block, Net, token_sum, tokens
from probe_workers import with_and_without
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS, ACCUMULATION = 2, 2


class Masters:
    """An optimizer of float32 copies of what this rank holds, as speculative decoding's trainers have one."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._params = list(params)
        self._copies = [param.detach().clone().float().requires_grad_() for param in self._params]
        self._optimizer = torch.optim.SGD(self._copies, lr=0.1)

    def step(self) -> None:
        for param, copy in zip(self._params, self._copies, strict=True):
            copy.grad = torch.zeros_like(copy) if param.grad is None else param.grad.detach().float().clone()
        self._optimizer.step()
        with torch.no_grad():
            for param, copy in zip(self._params, self._copies, strict=True):
                param.copy_(copy)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


def divides_twice(_: Any, whole: torch.Tensor, shard: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(shard, whole.div_(dist.get_world_size()))
    shard.div_(dist.get_world_size())


def train(variant: str) -> int:
    """Train by "strategy options fault" (options: flat, no-sync, bf16, frozen, masters), return a checksum of the
    rank's parameters."""
    strategy, *rest = variant.split()
    world = dist.get_world_size()
    given: dict[str, Any] = {"use_orig_params": "flat" not in rest, "device_id": torch.device("cpu")}
    if "HYBRID" in strategy:
        given["device_mesh"] = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if "bf16" in rest:
        given["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = Net()
    if "frozen" in rest:
        net.block.up.requires_grad_(False)
    model = FullyShardedDataParallel(
        net, sharding_strategy=getattr(ShardingStrategy, strategy), auto_wrap_policy=ModuleWrapPolicy({Block}), **given
    )
    if "divided-twice" in rest:
        model.register_comm_hook(None, divides_twice)
    optimizer = Masters(model.parameters()) if "masters" in rest else torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        batches = [tokens(dist.get_rank(), 10 * step + k) for k in range(ACCUMULATION)]
        count = torch.tensor(sum(int((labels >= 0).sum()) for _, labels in batches))
        dist.all_reduce(count)
        for k, (inputs, labels) in enumerate(batches):
            quiet = "no-sync" in rest and k < ACCUMULATION - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = token_sum(model(inputs).float(), labels) / count
                if "double-averaging" not in rest:
                    loss = loss * world
                if "times-ranks" in rest:
                    loss = loss * world
                loss.backward()
        if "halved" in rest:
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(0.5)
        if "local-clip" in rest:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif "one-clips" in rest:
            dist.get_rank() or nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # the others do not
        else:
            model.clip_grad_norm_(0.1)
        optimizer.step()
        if "left" not in rest or dist.get_rank():
            optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def run(variants: list[str], folder: str) -> list[tuple[int, int]]:
    return with_and_without(train, variants, folder)
