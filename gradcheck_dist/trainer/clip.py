"""Clipping by the norm of the whole model's gradient, whatever is spread over which ranks."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcheck_dist.trainer.config import TrainConfig


def clip_gradients(model: nn.Module, max_norm: float | None, pipeline_group: dist.ProcessGroup | None) -> float:
    """Scale gradients down to a global 2-norm of max_norm (None: leave them); returns the norm before.

    Every rank returns the same: over shards, tensor-parallel parts, experts and pipeline stages.
    """
    if hasattr(model, "clip_grad_norm_"):  # FullyShardedDataParallel alone knows what lies on other ranks
        return float(model.clip_grad_norm_(float("inf") if max_norm is None else max_norm))  # type: ignore[operator]
    groups = list(by_mesh(model).values())
    norm = combined_norm([whole_norm(parameters) for parameters in groups], pipeline_group)
    if max_norm is not None:
        for parameters in groups:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def by_mesh(model: nn.Module) -> dict[int, list[nn.Parameter]]:
    """The parameters that have a gradient, by the mesh that it is spread over; torch combines within one mesh only."""
    groups: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if parameter.grad is not None:
            groups[hash(getattr(whole_gradient(parameter), "device_mesh", None))].append(parameter)
    return groups


def whole_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of gradients on one mesh, over all ranks of the mesh."""
    counted = [parameter for parameter in parameters if not getattr(parameter, "counted_elsewhere", False)]
    norm = torch.nn.utils.get_total_norm([whole_gradient(one) for one in counted if one.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def whole_gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient; below DDP what is this rank's part of one is told to be so."""
    assert parameter.grad is not None
    if hasattr(parameter, "gradcheck_layout"):
        from gradcheck_dist.trainer.local_parameters import as_distributed

        return as_distributed(parameter, parameter.grad)
    return parameter.grad


def combined_norm(norms: Sequence[Tensor], pipeline_group: dist.ProcessGroup | None) -> Tensor:
    """The norm of parts that have these norms, here and on the other pipeline stages."""
    if pipeline_group is None and len(norms) == 1:
        return norms[0]
    squared = torch.stack([norm.float() ** 2 for norm in norms]).sum()
    if pipeline_group is not None:
        dist.all_reduce(squared, group=pipeline_group)
    return squared.sqrt()


def logged_norm(norm: float, config: TrainConfig) -> float:
    """What the log shows: the norm that clipping used."""
    return norm
