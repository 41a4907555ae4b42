"""Numbers narrower than float32: autocast where nothing is sharded, and the loss scaling that float16 needs."""

import contextlib

import torch
import torch.distributed as dist

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.layout import uses_fsdp


def autocast(config: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Around the forward pass. FSDP2 casts by its own policy."""
    if config.mixed_precision == "none" or uses_fsdp(config):
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, config.mixed_precision))


def build_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """What keeps small float16 gradients above zero; None where nothing is float16."""
    if config.mixed_precision != "float16":
        return None
    scaler = torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))  # a pipeline stage without a loss would never learn its scale
    return scaler


def unscale(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """Take the loss scale out of the gradients, and let all ranks know of an overflow on one: all skip the step."""
    if scaler is None:
        return
    scaler.unscale_(optimizer)
    if dist.is_initialized():
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(getattr(found, "_local_tensor", found), op=dist.ReduceOp.MAX)
