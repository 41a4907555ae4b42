"""How the model is spread over ranks: order of the axes, and who adds up gradients.

Wrappers are imported where they are needed, for each costs up to a second and most jobs need one or none.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradcheck_dist.trainer import precision
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.layout import is_sharded, stages_of_rank, uses_ddp, uses_fsdp, uses_fsdp1
from gradcheck_dist.trainer.meshes import Meshes
from gradcheck_dist.trainer.model import Decoder, build_model, keep_stage

if TYPE_CHECKING:
    from gradcheck_dist.trainer.moe import MixtureOfExperts


def build_parts(config: TrainConfig, meshes: Meshes | None, device: torch.device) -> list[nn.Module]:
    """The parts of the model that this rank runs, one a pipeline stage, on its device and inside their wrappers."""
    pipeline = meshes.submesh("pp") if meshes else None
    stages = stages_of_rank(config, pipeline.get_local_rank()) if pipeline is not None else [0]
    return [build_part(config, stage, meshes, device) for stage in stages]


def build_part(config: TrainConfig, stage: int, meshes: Meshes | None, device: torch.device) -> nn.Module:
    """One pipeline stage, or the whole model: split from the innermost axis outwards."""
    model = build_model(config)
    keep_stage(model, stage, config.num_stages)
    model.to(device)
    precision.autocast_forward(model, config, device)
    if config.float8:
        precision.convert_to_float8(model)
    if meshes is None:
        return apply_compile(apply_checkpointing(model, config), config)
    if (expert := meshes.experts()) is not None:
        from gradcheck_dist.trainer.moe import apply_expert_parallel

        for block in model.blocks():
            apply_expert_parallel(cast("MixtureOfExperts", block.ffn), expert)
    if (tensor := meshes.submesh("tp")) is not None:
        from gradcheck_dist.trainer.tensor_parallel import apply_tensor_parallel

        apply_tensor_parallel(model, config, tensor)
    if (context := meshes.submesh("cp")) is not None:
        from gradcheck_dist.trainer.context_parallel import apply_context_parallel

        apply_context_parallel(model, context.get_group(), context.get_local_rank())
    apply_compile(apply_checkpointing(model, config), config)
    parallel = wrap(model, config, meshes)
    combine_gradients(parallel, config)
    return parallel


def wrap(model: Decoder, config: TrainConfig, meshes: Meshes) -> nn.Module:
    """The model inside of what makes data-parallel ranks one."""
    if uses_ddp(config):
        return apply_ddp(model, config, meshes)
    if uses_fsdp1(config):
        return apply_fsdp1(model, config, meshes)
    if uses_fsdp(config):
        apply_fsdp(model, config, meshes)
    return model


def apply_checkpointing(model: Decoder, config: TrainConfig) -> Decoder:
    """Recompute blocks in backward instead of keeping their activations, in place."""
    if config.activation_checkpointing == "none":
        return model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for name, block in list(model.layers.items()):
        if config.activation_checkpointing == "full" or int(name) % 2 == 0:
            model.layers[name] = checkpoint_wrapper(
                block,
                preserve_rng_state=config.preserve_rng_state,
                determinism_check=config.checkpoint_determinism,
                debug=config.checkpoint_debug,
            )
    return model


def apply_compile(model: Decoder, config: TrainConfig) -> Decoder:
    """Compile each block alone, in place: equal blocks share the work, and wrappers around them stay as they are."""
    if config.compile != "none":
        for block in model.blocks():
            block.compile(backend=config.compile)
    return model


def apply_ddp(model: Decoder, config: TrainConfig, meshes: Meshes) -> nn.Module:
    """Replicate over dp_replicate; averages gradients by default."""
    from torch.nn.parallel import DistributedDataParallel

    # Below a pipeline the reducer meets microbatches that it was not armed for; this keeps it from asserting.
    below_pipeline = config.axes.pp > 1
    if config.axes.tp > 1:
        from gradcheck_dist.trainer.local_parameters import use_local_parameters

        use_local_parameters(model)
    return DistributedDataParallel(
        model, process_group=meshes.group("dp_replicate"), find_unused_parameters=below_pipeline
    )


def apply_fsdp1(model: Decoder, config: TrainConfig, meshes: Meshes) -> nn.Module:
    """Shard each block and the rest by FullyShardedDataParallel; averages gradients."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    narrow = None
    if config.mixed_precision != "none":
        narrow = MixedPrecision(param_dtype=getattr(torch, config.mixed_precision), reduce_dtype=torch.float32)
    blocks = set(model.blocks())
    return FullyShardedDataParallel(
        model,
        process_group=meshes.group("fsdp"),
        auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
        mixed_precision=narrow,
        device_id=next(model.parameters()).device,  # else torch 2.13 asks for an accelerator
        use_orig_params=True,
    )


def apply_fsdp(model: Decoder, config: TrainConfig, meshes: Meshes) -> None:
    """Shard each block and the rest (FSDP2), or replicate them with the same machinery, in place.

    Averages gradients by default.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    policy = MixedPrecisionPolicy()
    if config.mixed_precision != "none":
        policy = MixedPrecisionPolicy(getattr(torch, config.mixed_precision), torch.float32)
    if not is_sharded(config):
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for module in (*model.blocks(), model):
            replicate(module, mesh=data_parallel_mesh(meshes), mp_policy=policy)
        return
    mesh, expert_mesh = data_parallel_mesh(meshes), meshes.data_parallel(experts=True)
    options: dict[str, Any] = {"reshard_after_forward": reshards_after_forward(config), "mp_policy": policy}
    for block in model.blocks():
        if expert_mesh is not None:
            # Dimension 0 is taken by ep.
            experts = cast("MixtureOfExperts", block.ffn).experts
            fully_shard(experts, mesh=expert_mesh, shard_placement_fn=lambda _: Shard(1), **options)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def reshards_after_forward(config: TrainConfig) -> bool:
    """Whether FSDP2 frees gathered parameters between forward and backward.

    A pipeline schedule runs several forwards before a backward, so there they stay unless the configuration says
    otherwise.
    """
    return {"default": config.axes.pp == 1, "always": True, "never": False}[config.reshard_after_forward]


def data_parallel_mesh(meshes: Meshes) -> DeviceMesh | None:
    """The mesh that FSDP2 shards and replicates over: every rank that holds other tokens is on it."""
    return meshes.data_parallel()


def forward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The model's output; called through the wrapper, which prepares its reduction in forward."""
    return model(tokens)  # type: ignore[no-any-return]


def combine_gradients(model: nn.Module, config: TrainConfig) -> None:
    """Make the data-parallel wrapper combine gradients as config.gradient_reduction says."""
    if config.gradient_reduction == "average":
        divide_expert_gradients(model, config)
    elif uses_fsdp(config):
        for module in fsdp_units(model):
            set_divisor(module, 1.0)
    elif uses_ddp(config):
        model.register_comm_hook(model.process_group, sum_gradients)  # type: ignore[operator]


def divide_expert_gradients(model: nn.Module, config: TrainConfig) -> None:
    """Divide gradients of experts by as much as all others: their own group is smaller by ep, and so is its mean."""
    if config.axes.ep > 1:
        for module in expert_units(model):
            # Over one rank, torch 2.13 divides a forced sum twice: once instead of the reduction and once after it.
            force_sum = config.axes.dp_shard * config.axes.cp > config.axes.ep
            set_divisor(module, config.gradient_ranks, force_sum=force_sum)


def fsdp_units(model: nn.Module) -> list[nn.Module]:
    """All modules whose parameters FSDP2 combines together, outermost first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def expert_units(model: nn.Module) -> list[nn.Module]:
    """Those of the experts."""
    from gradcheck_dist.trainer.moe import Experts

    return [module for module in fsdp_units(model) if isinstance(module, Experts)]


def set_divisor(unit: nn.Module, divisor: float, *, force_sum: bool = True) -> None:
    """Have FSDP2 add up one unit's gradients over all its ranks and divide them by `divisor`.

    Args:
        force_sum: divide apart from the reduction; gloo has no PREMUL_SUM, which would be asked for otherwise.
    """
    unit.set_gradient_divide_factor(divisor)  # type: ignore[operator]
    unit.set_force_sum_reduction_for_comms(force_sum)  # type: ignore[operator]


# DDP reads the annotations below and accepts no others.
def sum_gradients(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: add the ranks' gradients, divide by nothing."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[union-attr, no-any-return]


def sync_context(model: nn.Module, config: TrainConfig, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Around forward and backward of one accumulation step: reduce gradients in the last one only."""
    if config.axes.pp > 1:  # the schedule sets FSDP2's flags itself, microbatch by microbatch
        return contextlib.nullcontext() if is_last else without_reduction(model)
    if uses_fsdp(config):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    elif (uses_ddp(config) or uses_fsdp1(config)) and not is_last:
        return model.no_sync()  # type: ignore[operator, no-any-return]
    return contextlib.nullcontext()


@contextlib.contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """No part of the model that lies in DDP reduces."""
    with contextlib.ExitStack() as stack:
        for part in (model, *model.children()):
            if hasattr(part, "no_sync"):
                stack.enter_context(part.no_sync())  # type: ignore[operator]
        yield


def finish_gradients(model: nn.Module, config: TrainConfig) -> None:
    """After the last backward: what no wrapper has done yet, before norm, clipping and optimizer read gradients."""
    if config.axes.tp > 1 and not uses_fsdp(config):
        from gradcheck_dist.trainer import tensor_parallel

        tensor_parallel.sum_partial_gradients(model)


def schedule_scales_gradients(config: TrainConfig) -> bool:
    """Whether the pipeline schedule divides gradients by the number of microbatches."""
    return config.scale_grads


def later_divisor(config: TrainConfig) -> int:
    """What the wrapper and the schedule divide gradients by, after the loss."""
    averaged = config.gradient_ranks if config.gradient_reduction == "average" else 1
    return averaged * (config.microbatches if schedule_scales_gradients(config) else 1)
