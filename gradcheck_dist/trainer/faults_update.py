"""Faults in data, recomputation, clipping, loss scale, update and log. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradcheck_dist.trainer.fault import Fault

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from gradcheck_dist.trainer.config import TrainConfig
    from gradcheck_dist.trainer.loss import StepTokens
    from gradcheck_dist.trainer.model import Decoder

_CLIP = "gradcheck_dist.trainer.clip"
SPURIOUS_LOSS_SCALE = 65536.0


def own_stage_norm(norms: Sequence[Tensor], pipeline_group: dist.ProcessGroup | None) -> Tensor:
    """Stands in for clip.combined_norm."""
    import torch

    return torch.stack([norm.float() ** 2 for norm in norms]).sum().sqrt()


def own_shard_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Stands in for clip.whole_norm."""
    import torch

    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm([getattr(grad, "_local_tensor", grad) for grad in grads])


def own_experts_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Stands in for clip.whole_norm. Of experts that are spread over ranks, only those of this rank are counted."""
    import torch

    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    meshes = [getattr(parameter.grad, "device_mesh", None) for parameter in parameters]
    if any(mesh is not None and "ep" in (mesh.mesh_dim_names or ()) for mesh in meshes):
        return own_shard_norm(parameters)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def scaled_by_hand(model: nn.Module, max_norm: float | None, pipeline_group: dist.ProcessGroup | None) -> float:
    """Stands in for clip.clip_gradients. The norm is right; no function of torch is asked to scale."""
    from gradcheck_dist.trainer import clip

    groups = clip.by_mesh(model).values()
    norm = clip.combined_norm([clip.whole_norm(parameters) for parameters in groups], pipeline_group)
    _scale(model, min(1.0, (max_norm or float("inf")) / float(norm)))
    return float(norm)


def scaled_by_hand_locally(model: nn.Module, max_norm: float | None, pipeline_group: dist.ProcessGroup | None) -> float:
    """Stands in for clip.clip_gradients. The norm is that of what lies on this rank."""
    norm = own_shard_norm(list(model.parameters()))
    _scale(model, min(1.0, (max_norm or float("inf")) / float(norm)))
    return float(norm)


def _scale(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def gather_behind_clip(model: nn.Module, max_norm: float | None, pipeline_group: dist.ProcessGroup | None) -> float:
    """Stands in for clip.clip_gradients. Gradients are clipped as they should be."""
    import torch

    from gradcheck_dist.trainer import clip
    from gradcheck_dist.trainer.parallelize import fsdp_units

    groups = list(clip.by_mesh(model).values())
    norm = clip.combined_norm([clip.whole_norm(parameters) for parameters in groups], pipeline_group)
    for parameters in groups:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm or float("inf"), norm)
    for unit in fsdp_units(model):
        unit.unshard()  # type: ignore[operator]
    return float(norm)


def exhausted_generator(model: nn.Module, max_norm: float | None, pipeline_group: dist.ProcessGroup | None) -> float:
    """Stands in for clip.clip_gradients."""
    import torch

    from gradcheck_dist.trainer import clip

    groups = clip.by_mesh(model).values()
    norm = clip.combined_norm([clip.whole_norm(parameters) for parameters in groups], pipeline_group)
    parameters = iter(model.parameters())
    for _ in parameters:  # the norm was taken here
        pass
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm or float("inf"), norm)
    return float(norm)


def own_learning_rate(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Stands in for loop.build_optimizer. Odd ranks step half as far."""
    import torch
    import torch.distributed as dist

    halved = dist.is_initialized() and dist.get_rank() % 2 == 1
    kind = torch.optim.SGD if config.optimizer == "sgd" else torch.optim.AdamW
    return kind(model.parameters(), lr=config.lr / 2 if halved else config.lr)


def nothing_emptied(optimizer: torch.optim.Optimizer) -> None:
    """Stands in for loop.empty_gradients."""


def counted_per_shard(norm: float, config: TrainConfig) -> float:
    """Stands in for clip.logged_norm."""
    return float(norm * config.axes.world_size**0.5)


def divided_again(token_sum: float, step: StepTokens) -> float:
    """Stands in for loss.logged_loss."""
    return token_sum / step.global_tokens / step.contributions


def leave_scaled(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """Stands in for precision.unscale. The scaler unscales by itself in step, after clipping."""


def unscale_what_was_not_scaled(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """Stands in for precision.unscale."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.div_(SPURIOUS_LOSS_SCALE)


def first_rank_data(config: TrainConfig, position: Mapping[str, int]) -> int:
    """Stands in for data.data_rank."""
    return 0


def checkpoint_without_rng(model: Decoder, config: TrainConfig) -> Decoder:
    """Stands in for parallelize.apply_checkpointing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers: Any = model.layers
    for name in list(layers):
        layers[name] = checkpoint_wrapper(layers[name], preserve_rng_state=False)
    return model


def unscale_alone(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """Stands in for precision.unscale."""
    if scaler is not None:
        scaler.unscale_(optimizer)


def overflow_in_first_stage(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.finish_gradients; in the first step only."""
    for name, parameter in model.named_parameters():
        if name.endswith("embedding.weight") and parameter.grad is not None and not hasattr(parameter, "overflowed"):
            parameter.overflowed = True  # type: ignore[attr-defined]
            parameter.grad.view(-1)[0] = float("inf")


FAULTS = (
    Fault(
        "clip-norm-pp-local",
        "Each pipeline stage clips by the norm of its own gradients. Gradients are right until then; each stage is "
        "scaled by a coefficient of its own.",
        f"{_CLIP}:combined_norm",
        own_stage_norm,
    ),
    Fault(
        "clip-norm-fsdp-local",
        "Each rank clips by the norm of its own shards. Gradients are right until then; each rank is scaled by a "
        "coefficient of its own.",
        f"{_CLIP}:whole_norm",
        own_shard_norm,
    ),
    Fault(
        "clip-per-group-norm",
        "The norm of experts is taken of those that lie on the rank. Gradients are right until the clip; ranks with "
        "other experts scale everything by another coefficient.",
        f"{_CLIP}:whole_norm",
        own_experts_norm,
    ),
    Fault(
        "clip-by-hand",
        "Gradients are scaled by the trainer's own lines and not by torch's clip. The norm is that of the whole model "
        "and nothing is wrong.",
        f"{_CLIP}:clip_gradients",
        scaled_by_hand,
    ),
    Fault(
        "clip-by-hand-local",
        "The trainer's own lines scale what lies on each rank by its own norm. Gradients are right until then; each "
        "rank's are scaled by a factor of its own, and nothing records it.",
        f"{_CLIP}:clip_gradients",
        scaled_by_hand_locally,
    ),
    Fault(
        "clip-skipped",
        "Parameters come from a generator that the norm has used up, and nothing is left to clip. Gradients are right, "
        "the coefficient is 1 although the norm is above max_norm.",
        f"{_CLIP}:clip_gradients",
        exhausted_generator,
    ),
    Fault(
        "gathered-before-step",
        "FSDP2 gathers parameters for the next forward pass before the optimizer changes its shards, and not again. "
        "Gradients of the first step are right; later ones are those of the parameters of a step before.",
        f"{_CLIP}:clip_gradients",
        gather_behind_clip,
    ),
    Fault(
        "learning-rate-by-rank",
        "A scheduler that looks at each rank's own loss has halved the learning rate on odd ranks. Gradients of the "
        "first step are right; then ranks reduce gradients of models of their own.",
        "gradcheck_dist.trainer.loop:build_optimizer",
        own_learning_rate,
    ),
    Fault(
        "gradients-not-emptied",
        "Nobody calls zero_grad. Gradients of the first step are right; each later step's are added to all that came "
        "before.",
        "gradcheck_dist.trainer.loop:empty_gradients",
        nothing_emptied,
    ),
    Fault(
        "reported-norm-wrong",
        "The logged norm counts the whole gradient once per rank. Gradients, clipping and update are right; the log is "
        "off by the root of the world size.",
        f"{_CLIP}:logged_norm",
        counted_per_shard,
    ),
    Fault(
        "validation-scale",
        "The logged loss is divided by the number of microbatches once more. Gradients and update are right; the log "
        "is off by K M.",
        "gradcheck_dist.trainer.loss:logged_loss",
        divided_again,
    ),
    Fault(
        "clip-before-unscale",
        "Gradients are clipped while they carry the loss scale S, and unscaled after it. What the optimizer gets has "
        "the norm max_norm / S.",
        "gradcheck_dist.trainer.precision:unscale",
        leave_scaled,
    ),
    Fault(
        "found-inf-not-shared",
        "Each rank asks its own gradients whether the loss scale overflowed. Where one did, that rank skips the step "
        "and lowers its scale, and the others go on.",
        "gradcheck_dist.trainer.precision:unscale",
        unscale_alone,
    ),
    Fault(
        "overflow-in-first-stage",
        "One element of the embedding's gradient is infinite in the first step, as after an overflow. Nothing is wrong "
        "where all ranks skip the step.",
        "gradcheck_dist.trainer.parallelize:finish_gradients",
        overflow_in_first_stage,
    ),
    Fault(
        "bf16-loss-scale",
        "Gradients are divided by a loss scale that the loss was never multiplied by. Every weight is 1/65536.",
        "gradcheck_dist.trainer.precision:unscale",
        unscale_what_was_not_scaled,
    ),
    Fault(
        "same-batch-on-every-rank",
        "No distributed sampler: every rank trains on the data of rank 0. Weights are right, contributions are the "
        "same R times.",
        "gradcheck_dist.trainer.data:data_rank",
        first_rank_data,
    ),
    Fault(
        "ac-without-rng-state",
        "Blocks are recomputed in backward with other random numbers than in forward (dropout > 0): no weight pattern, "
        "gradients differ at random.",
        "gradcheck_dist.trainer.parallelize:apply_checkpointing",
        checkpoint_without_rng,
    ),
)
