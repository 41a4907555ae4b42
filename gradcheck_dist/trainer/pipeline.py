"""The pipeline schedule that runs this rank's stages."""

import typing
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcheck_dist.trainer import parallelize
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.layout import SINGLE_STAGE_SCHEDULES, stages_of_rank, uses_fsdp
from gradcheck_dist.trainer.meshes import Meshes

if typing.TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule

_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "loopedbfs": "ScheduleLoopedBFS",
    "interleavedzerobubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def build_schedule(
    parts: list[nn.Module],
    config: TrainConfig,
    meshes: Meshes | None,
    device: torch.device,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> "_PipelineSchedule | None":
    """The schedule over the parts, which are in the order of their stages; None without a pipeline."""
    mesh = meshes.submesh("pp") if meshes else None
    if mesh is None:
        return None
    from torch.distributed.pipelining import schedules

    stages = [
        build_stage(part, index, config, device, mesh.get_group())
        for part, index in zip(parts, stages_of_rank(config, mesh.get_local_rank()), strict=True)
    ]
    schedule = getattr(schedules, _CLASSES[config.schedule])
    return schedule(
        stages[0] if config.schedule in SINGLE_STAGE_SCHEDULES else stages,
        config.microbatches,
        loss_fn=loss,
        scale_grads=parallelize.schedule_scales_gradients(config),
    )


def build_stage(
    part: nn.Module, index: int, config: TrainConfig, device: torch.device, group: dist.ProcessGroup
) -> "PipelineStage":
    """One stage."""
    from gradcheck_dist.trainer.stages import AccumulatingStage

    return AccumulatingStage(part, index, config.num_stages, device, group=group, **stage_shapes(index, config))


def stage_shapes(index: int, config: TrainConfig) -> dict[str, Any]:
    """What goes into a stage and comes out. Given these, torch sends no trial batch through model and loss first."""
    ids, hidden, logits = _shapes(config)
    is_last = index == config.num_stages - 1
    return {"input_args": hidden if index else ids, "output_args": logits if is_last else hidden}


def _shapes(config: TrainConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Meta tensors like one microbatch of ids, of hidden states between stages, and of logits."""
    narrow = config.mixed_precision if config.mixed_precision != "none" else config.dtype
    dtype = getattr(torch, narrow)
    # Under autocast what is added up along the residuals stays as wide as the embedding.
    between_dtype = dtype if uses_fsdp(config) else getattr(torch, config.dtype)
    positions = config.seq_len // config.axes.cp
    between = positions // config.axes.tp if config.sequence_parallel else positions
    heads = (1 + config.num_mtp_heads,) if config.num_mtp_heads else ()
    return (
        torch.empty(config.batch_size, positions, device="meta", dtype=torch.int64),
        torch.empty(config.batch_size, between, config.dim, device="meta", dtype=between_dtype, requires_grad=True),
        torch.empty(
            config.batch_size, positions, *heads, config.vocab_size, device="meta", dtype=dtype, requires_grad=True
        ),
    )
