"""How the model is spread over ranks: one function an axis.

Wrappers are imported where they are needed, for each costs up to a second and most jobs need one or none.
"""

import contextlib
import typing

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradcheck_dist.axes import MESH_AXES
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.loss import TokenMeanLoss
from gradcheck_dist.trainer.model import Decoder, keep_stage

if typing.TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

DATA_AXES = ("dp_replicate", "dp_shard")
"""Mesh axes along which ranks see different sequences."""


def build_mesh(config: TrainConfig, device: torch.device) -> DeviceMesh | None:
    """The mesh of the axes that are in use, outermost first; None for a single process. A collective call."""
    names = tuple(name for name in MESH_AXES if getattr(config.axes, name) > 1)
    if not names:
        return None
    return init_device_mesh(device.type, tuple(getattr(config.axes, name) for name in names), mesh_dim_names=names)


def axis_group(mesh: DeviceMesh | None, *axes: str) -> dist.ProcessGroup | None:
    """The process group along the one of `axes` that is in use; None when none of them is."""
    used = [axis for axis in axes if mesh is not None and axis in (mesh.mesh_dim_names or ())]
    assert len(used) < 2, f"a group along {used} at once needs a flattened mesh"
    return mesh[used[0]].get_group() if mesh is not None and used else None


def parallelize(model: Decoder, config: TrainConfig, mesh: DeviceMesh | None, device: torch.device) -> nn.Module:
    """The part of the model that this rank runs, on its device and inside its data-parallel wrapper."""
    axes = config.axes
    if mesh is not None and axes.pp > 1:
        keep_stage(model, mesh["pp"].get_local_rank(), axes.pp)
    parallel: nn.Module = model.to(device)
    if mesh is not None and axes.dp_shard > 1:
        parallel = apply_fsdp(model, mesh["dp_shard"], reshard_after_forward=axes.pp == 1)
    elif mesh is not None and axes.dp_replicate > 1:
        parallel = apply_ddp(model, mesh["dp_replicate"])
    combine_gradients(parallel, config)
    return parallel


def apply_ddp(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """Replicate over a one-dimensional mesh; averages gradients by default."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, process_group=mesh.get_group())


def apply_fsdp(model: Decoder, mesh: DeviceMesh, *, reshard_after_forward: bool) -> nn.Module:
    """Shard each block and the rest over a mesh (FSDP2), in place; averages gradients by default.

    Args:
        reshard_after_forward: give parameters back between forward and backward. A pipeline schedule runs several
            forwards before a backward and would gather them once more for each.
    """
    from torch.distributed.fsdp import fully_shard

    for block in model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model


def combine_gradients(model: nn.Module, config: TrainConfig) -> None:
    """Make the data-parallel wrapper combine gradients as config.gradient_reduction says."""
    if config.gradient_reduction == "average":
        return  # the default of both wrappers
    if config.axes.dp_shard > 1:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM, which a factor would ask for
    elif config.axes.dp_replicate > 1:
        model.register_comm_hook(model.process_group, sum_gradients)  # type: ignore[operator]


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
    if config.axes.pp > 1:
        return contextlib.nullcontext()  # the schedule sets FSDP2's flags itself, microbatch by microbatch
    if config.axes.dp_shard > 1:
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
    elif config.axes.dp_replicate > 1 and not is_last:
        return model.no_sync()  # type: ignore[operator, no-any-return]
    return contextlib.nullcontext()


def schedule_scales_gradients(config: TrainConfig) -> bool:
    """Whether the pipeline schedule divides gradients by the number of microbatches."""
    return config.scale_grads


def later_divisor(config: TrainConfig) -> int:
    """What the wrapper and the schedule divide gradients by, after the loss."""
    averaged = config.axes.data_parallel_degree if config.gradient_reduction == "average" else 1
    return averaged * (config.microbatches if schedule_scales_gradients(config) else 1)


def build_schedule(
    model: nn.Module, config: TrainConfig, mesh: DeviceMesh | None, device: torch.device, loss: TokenMeanLoss
) -> "PipelineScheduleSingle | None":
    """The pipeline schedule that runs this rank's stage; None without a pipeline."""
    if mesh is None or config.axes.pp == 1:
        return None
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage_index, num_stages = mesh["pp"].get_local_rank(), config.axes.pp
    rows = (config.batch_size, config.seq_len)
    dtype = getattr(torch, config.dtype)
    ids = torch.empty(rows, device="meta", dtype=torch.int64)
    hidden = torch.empty(*rows, config.dim, device="meta", dtype=dtype, requires_grad=True)
    logits = torch.empty(*rows, config.vocab_size, device="meta", dtype=dtype, requires_grad=True)
    # With shapes given, torch does not send a trial batch through model and loss first.
    stage = PipelineStage(
        model,
        stage_index,
        num_stages,
        device,
        input_args=hidden if stage_index else ids,
        output_args=hidden if stage_index < num_stages - 1 else logits,
        group=mesh["pp"].get_group(),
    )
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[config.schedule]
    return schedule(stage, config.microbatches, loss_fn=loss, scale_grads=schedule_scales_gradients(config))
