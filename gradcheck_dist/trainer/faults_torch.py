"""Faults that are torch's own (seen with 2.13): the trainer avoids them, and these take the precaution away.

Imports no torch. Weights are relative to the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradcheck_dist.trainer.fault import Fault

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from gradcheck_dist.trainer.config import TrainConfig
    from gradcheck_dist.trainer.meshes import Meshes
    from gradcheck_dist.trainer.model import Decoder


def always_reshard(config: TrainConfig) -> bool:
    """Stands in for parallelize.reshards_after_forward."""
    return True


def wrap_in_ddp(model: Decoder, config: TrainConfig, meshes: Meshes) -> nn.Module:
    """Stands in for parallelize.wrap."""
    from gradcheck_dist.trainer.parallelize import apply_ddp

    return apply_ddp(model, config, meshes)


def stage_without_shapes(
    part: nn.Module, index: int, config: TrainConfig, device: torch.device, group: dist.ProcessGroup
) -> Any:
    """Stands in for pipeline.build_stage."""
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(part, index, config.num_stages, device, group=group)


def stage_of_torch(
    part: nn.Module, index: int, config: TrainConfig, device: torch.device, group: dist.ProcessGroup
) -> Any:
    """Stands in for pipeline.build_stage."""
    from torch.distributed.pipelining import PipelineStage

    from gradcheck_dist.trainer.pipeline import stage_shapes

    return PipelineStage(part, index, config.num_stages, device, group=group, **stage_shapes(index, config))


def force_sum_over_one_rank(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.divide_expert_gradients."""
    from gradcheck_dist.trainer.parallelize import expert_units, set_divisor

    for unit in expert_units(model):
        set_divisor(unit, config.gradient_ranks, force_sum=True)


FAULTS = (
    Fault(
        "zero-bubble-reshards",
        "FSDP2 frees parameters after forward, its default, under a schedule that computes weight gradients apart "
        "(interleavedzerobubble, zbv, dualpipev): some gradients are wrong or missing, without an error.",
        "gradcheck_dist.trainer.parallelize:reshards_after_forward",
        always_reshard,
    ),
    Fault(
        "zero-bubble-in-ddp",
        "DistributedDataParallel below a schedule that computes weight gradients apart (replication 'composable', "
        "gradient_reduction 'average'; pytorch#144530): torch.autograd.grad does not run the nodes that DDP's reducer "
        "waits at, so all stages but those with a whole backward are never reduced, and replicas drift apart.",
        "gradcheck_dist.trainer.parallelize:wrap",
        wrap_in_ddp,
    ),
    Fault(
        "pipeline-infers-shapes-in-ddp",
        "The schedule sends a trial batch through DDP to learn shapes, which arms its reduction: microbatch 0 of the "
        "first step is reduced twice and weighs dp_replicate under a summing hook, all others 1.",
        "gradcheck_dist.trainer.pipeline:build_stage",
        stage_without_shapes,
    ),
    Fault(
        "pipeline-ignores-no-sync",
        "The schedule arms DDP's reducer in every accumulation step, also below no_sync: under a summing hook step k "
        "weighs dp_replicate^(K-1-k).",
        "gradcheck_dist.trainer.pipeline:build_stage",
        stage_of_torch,
    ),
    Fault(
        "fsdp-divides-twice-over-one-rank",
        "A divide factor with forced SUM on a unit whose shard mesh has one rank, here experts with ep = dp_shard * cp "
        "(gradient_reduction 'average'): FSDP2 divides instead of reducing, and once more after it. Experts weigh 1/R.",
        "gradcheck_dist.trainer.parallelize:divide_expert_gradients",
        force_sum_over_one_rank,
    ),
)
