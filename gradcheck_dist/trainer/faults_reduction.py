"""Faults in who adds up gradients, over which ranks, and when. Imports no torch.

Notation: R ranks that hold other tokens (dp_replicate * dp_shard * cp), K accumulation steps (k counts from 0), M
pipeline microbatches. Weights are relative to the right one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gradcheck_dist.trainer.fault import Fault

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from gradcheck_dist.trainer.config import TrainConfig
    from gradcheck_dist.trainer.meshes import Meshes
    from gradcheck_dist.trainer.model import Decoder

_PARALLELIZE = "gradcheck_dist.trainer.parallelize"
FORGOTTEN_UNIT = "0"
"""The layer, or the parameter in it, that a fault forgets."""
FORGOTTEN_PARAMETER = "layers.0.attention.wq.weight"


def leave_averaging(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.combine_gradients."""


def average_replicas(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.combine_gradients."""
    from gradcheck_dist.trainer.parallelize import fsdp_units, set_divisor

    for unit in fsdp_units(model):
        set_divisor(unit, config.axes.dp_replicate)


def average_context(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.combine_gradients."""
    from gradcheck_dist.trainer.parallelize import fsdp_units, set_divisor

    for unit in fsdp_units(model):
        set_divisor(unit, config.axes.cp)


def divide_by_shards(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.combine_gradients."""
    from gradcheck_dist.trainer.parallelize import fsdp_units, set_divisor

    for unit in fsdp_units(model):
        set_divisor(unit, config.axes.dp_shard)


def forget_one_unit(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.combine_gradients."""
    from gradcheck_dist.trainer.parallelize import fsdp_units, set_divisor

    for unit in fsdp_units(model):
        if unit is not model.layers[FORGOTTEN_UNIT]:  # type: ignore[index]
            set_divisor(unit, 1.0)


def leave_experts(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.divide_expert_gradients."""


def divide_experts_twice(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.divide_expert_gradients."""
    from gradcheck_dist.trainer.parallelize import expert_units, set_divisor

    for unit in expert_units(model):
        force_sum = config.axes.dp_shard * config.axes.cp > config.axes.ep
        set_divisor(unit, config.gradient_ranks * config.axes.ep, force_sum=force_sum)


def lose_replicas(meshes: Meshes) -> DeviceMesh | None:
    """Stands in for parallelize.data_parallel_mesh."""
    return meshes.submesh("fsdp")


def lose_context(meshes: Meshes) -> DeviceMesh | None:
    """Stands in for parallelize.data_parallel_mesh."""
    return meshes.submesh("dp_shard")


def ignore_one_parameter(model: Decoder, config: TrainConfig, meshes: Meshes) -> nn.Module:
    """Stands in for parallelize.apply_ddp."""
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [FORGOTTEN_PARAMETER])
    return DistributedDataParallel(model, process_group=meshes.group("dp_replicate"))


def go_around_the_wrapper(model: nn.Module, tokens: Tensor) -> Tensor:
    """Stands in for parallelize.forward."""
    return model.module(tokens)  # type: ignore[operator, no-any-return]


def reduce_once_more(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.finish_gradients."""
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # type: ignore[arg-type]


def drop_partial_sums(model: nn.Module) -> None:
    """Stands in for tensor_parallel.sum_partial_gradients."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        grad = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(grad, DTensor):
            continue
        if any(placement.is_partial() for placement in grad.placements):
            parameter.grad = DTensor.from_local(grad.to_local(), grad.device_mesh, parameter.placements)
        else:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def divide_before_sending(
    part: nn.Module, index: int, config: TrainConfig, device: torch.device, group: dist.ProcessGroup
) -> Any:
    """Stands in for pipeline.build_stage."""
    from gradcheck_dist.trainer.pipeline import stage_shapes
    from gradcheck_dist.trainer.stages import AccumulatingStage

    class DividingStage(AccumulatingStage):
        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
            if self.is_last:
                (grad,) = self.bwd_cache[bwd_chunk_id]
                assert grad is not None
                self.bwd_cache[bwd_chunk_id] = (grad / config.num_stages,)

    return DividingStage(part, index, config.num_stages, device, group=group, **stage_shapes(index, config))


def router_without_sum(weight: Tensor) -> Tensor:
    """Stands in for moe.router_weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def leave_apart(model: nn.Module) -> None:
    """Stands in for tensor_parallel.tie_again."""


def keep_copies_apart(parts: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Stands in for tied.sum_tied_gradients."""


def sync_always(model: nn.Module, config: TrainConfig, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Stands in for parallelize.sync_context."""
    return contextlib.nullcontext()


def sync_all_but_last(model: nn.Module, config: TrainConfig, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Stands in for parallelize.sync_context."""
    from gradcheck_dist.trainer.layout import uses_ddp

    if uses_ddp(config):
        return model.no_sync() if is_last else contextlib.nullcontext()  # type: ignore[operator, no-any-return]
    model.set_requires_gradient_sync(not is_last)  # type: ignore[operator]
    return contextlib.nullcontext()


@contextlib.contextmanager
def flag_after_forward(model: nn.Module, config: TrainConfig, is_last: bool) -> Iterator[None]:
    """Stands in for parallelize.sync_context. DDP reads the flag in forward only, so later is all the same."""
    yield
    model.require_backward_grad_sync = is_last  # type: ignore[assignment]


@contextlib.contextmanager
def empty_gradients(model: nn.Module, config: TrainConfig, is_last: bool) -> Iterator[None]:
    """Stands in for parallelize.sync_context."""
    model.zero_grad()
    yield


def schedule_always_scales(config: TrainConfig) -> bool:
    """Stands in for parallelize.schedule_scales_gradients."""
    return True


_ENTRIES = (
    (
        "ddp-averages",
        "The loss is divided by the tokens of all ranks, and the data-parallel wrapper still averages over them. "
        "Every weight is 1/R of what it should be.",
        "combine_gradients",
        leave_averaging,
    ),
    (
        "hsdp-replicate-averages",
        "Sharding was told to sum, but replicas are averaged over. Every weight is 1/dp_replicate.",
        "combine_gradients",
        average_replicas,
    ),
    (
        "hsdp-divide-factor-differs",
        "The divide factor is that of sharding alone, as on a mesh of one dimension, and replicas are added up "
        "undivided (gradient_reduction 'average'). Every weight is dp_replicate.",
        "combine_gradients",
        divide_by_shards,
    ),
    (
        "cp-averages",
        "Gradients are averaged over cp, although each rank holds another part of the sum over tokens. Every weight is "
        "1/cp.",
        "combine_gradients",
        average_context,
    ),
    (
        "fsdp-one-unit-averages",
        "The divide factor was set on every FSDP2 unit but one. Weights of layer 0 are 1/R, all others right.",
        "combine_gradients",
        forget_one_unit,
    ),
    (
        "ep-fsdp-divide-mismatch",
        "FSDP2 averages experts over their own, smaller group (gradient_reduction 'average'). Experts weigh ep, all "
        "others are right.",
        "divide_expert_gradients",
        leave_experts,
    ),
    (
        "expert-group-wrong",
        "The divisor of the experts counts ep twice (gradient_reduction 'average'). Experts weigh 1/ep, all others are "
        "right.",
        "divide_expert_gradients",
        divide_experts_twice,
    ),
    (
        "hsdp-replica-not-reduced",
        "The replicate axis got lost from the mesh: FSDP2 shards within a replica and nothing joins replicas. Tokens "
        "of the own replica weigh 1, others 0; replicas drift apart.",
        "data_parallel_mesh",
        lose_replicas,
    ),
    (
        "ddp-group-excludes-cp",
        "FSDP2 shards over dp_shard, while cp splits sequences as well: what the other ranks of cp found is missing. "
        "The gradients of the cp ranks add up to the right one.",
        "data_parallel_mesh",
        lose_context,
    ),
    (
        "param-ignored-by-ddp",
        "One parameter is on DDP's ignore list and never reduced: tokens of the own rank weigh 1, others 0, in "
        f"{FORGOTTEN_PARAMETER} alone (gradient_reduction 'sum').",
        "apply_ddp",
        ignore_one_parameter,
    ),
    (
        "manual-optimization-no-sync",
        "The model inside of DDP is called instead of DDP, which then prepares no reduction: tokens of the own rank "
        "weigh 1, others 0 (gradient_reduction 'sum').",
        "forward",
        go_around_the_wrapper,
    ),
    (
        "explicit-plus-ddp-reduce",
        "A hand-written all-reduce adds up what DDP has added up. Every weight is R.",
        "finish_gradients",
        reduce_once_more,
    ),
    (
        "sync-every-backward",
        "no_sync is missing, so DDP reduces in every accumulation step all that has been accumulated so far. Under a "
        "summing hook step k weighs R^(K-1-k); under averaging, or under FSDP2, the bug only costs time.",
        "sync_context",
        sync_always,
    ),
    (
        "no-sync-inverted",
        "The condition of no_sync is negated. Under DDP with a summing hook step k < K-1 weighs R^(K-2-k), and of the "
        "last step the own rank weighs 1 and others 0. Under FSDP2 the last step weighs 0, all others 1.",
        "sync_context",
        sync_all_but_last,
    ),
    (
        "sync-flag-between-forward-and-backward",
        "DDP's sync flag is set between forward and backward, but read in forward: each step obeys the one before. "
        "Step 0 is reduced and weighs 1; of later ones the own rank weighs 1 and others 0 (gradient_reduction 'sum').",
        "sync_context",
        flag_after_forward,
    ),
    (
        "zero-grad-inside-accumulation",
        "Gradients are emptied in every accumulation step. The last weighs 1, all others 0.",
        "sync_context",
        empty_gradients,
    ),
    (
        "schedule-scales-grads",
        "The pipeline schedule takes the mean over its microbatches by dividing the gradients by M, and it divides "
        "those of earlier accumulation steps again each time: step k weighs M^-(K-1-k), on every stage.",
        "schedule_scales_gradients",
        schedule_always_scales,
    ),
)
FAULTS = (
    *(Fault(name, story, f"{_PARALLELIZE}:{target}", function) for name, story, target, function in _ENTRIES),
    Fault(
        "sp-norm-partial",
        "Norms under sequence parallelism see a part of the sequence on each rank of tp, and their gradients are used "
        "without being added up. The gradients of the tp ranks add up to the right one.",
        "gradcheck_dist.trainer.tensor_parallel:sum_partial_gradients",
        drop_partial_sums,
    ),
    Fault(
        "moe-router-missing-tp-reduce",
        "The router's weight becomes a plain tensor without a word about its gradient, which is a summand on each rank "
        "of tp and is taken for the whole. The gradients of the tp ranks add up to the right one.",
        "gradcheck_dist.trainer.moe:router_weight",
        router_without_sum,
    ),
    Fault(
        "tied-embedding-across-pp",
        "The tied matrix lies on the first and on the last pipeline stage, and the two gradients are never summed: "
        "each copy holds its own stage's part, and the copies drift apart.",
        "gradcheck_dist.trainer.tied:sum_tied_gradients",
        keep_copies_apart,
    ),
    Fault(
        "tie-broken-by-tp",
        "Splitting the layers gives embedding and head a matrix each, where they shared one, and nobody ties them "
        "again: each trains on the gradient of its own use.",
        "gradcheck_dist.trainer.tensor_parallel:tie_again",
        leave_apart,
    ),
    Fault(
        "scaled-in-flight",
        "The last pipeline stage divides the gradient of its input by the number of stages S before it sends it: "
        "weights of all earlier stages are 1/S, those of the last one are right.",
        "gradcheck_dist.trainer.pipeline:build_stage",
        divide_before_sending,
    ),
)
