"""Numbers narrower than float32: autocast, float8 layers, and the scaling that float16 needs."""

import torch
import torch.distributed as dist
from torch import nn

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.layout import uses_fsdp, uses_fsdp1


def autocast_forward(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Run the forward pass of a model part in the narrow type, in place. FSDP2 casts by its own policy."""
    if config.mixed_precision != "none" and not uses_fsdp(config) and not uses_fsdp1(config):
        narrow = torch.autocast(device.type, getattr(torch, config.mixed_precision))
        model.forward = narrow(model.forward)


def convert_to_float8(model: nn.Module) -> None:
    """Have the linear layers of all blocks multiply in float8, in place; a router stays as it is.

    Source: torchao.float8, dynamic scaling by tensor; arXiv 2209.05433 for the formats.

    Raises:
        GradcheckError: E219 torchao is not installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise GradcheckError(
            f"float8=true needs torchao, which cannot be imported: {error}. Install gradcheck-dist[float8], or set "
            "float8=false.",
            code="E219",
        ) from error
    # CUDA multiplies float8 from compute capability 8.9 on; elsewhere values are rounded and multiplied in float32.
    emulate = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
    convert_to_float8_training(
        model,
        config=Float8LinearConfig(emulate=emulate),
        module_filter_fn=lambda module, name: name.startswith(("layers.", "mtp.")) and not name.endswith("router"),
    )


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
