"""Faults inside of the accumulation loop and on the wire, as they were reported in public threads. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gradcheck_dist.trainer.fault import Fault

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from gradcheck_dist.trainer.config import TrainConfig


@contextlib.contextmanager
def keep_the_last(model: nn.Module, config: TrainConfig, is_last: bool) -> Iterator[None]:
    """Stands in for parallelize.sync_context."""
    for parameter in model.parameters():
        parameter.grad = None
    with contextlib.nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
        yield


class _Wrapped:
    """Another object with the same parameters, as a wrapper around the optimizer is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups = optimizer.param_groups


def unscale_the_wrapper(scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """Stands in for precision.unscale. The scaler remembers whom it has unscaled by the object, and in step it unscales
    the optimizer."""
    if scaler is not None:
        scaler.unscale_(_Wrapped(optimizer))  # type: ignore[arg-type]


def never_empty_inputs(
    part: nn.Module, index: int, config: TrainConfig, device: torch.device, group: dist.ProcessGroup
) -> Any:
    """Stands in for pipeline.build_stage."""
    from gradcheck_dist.trainer.pipeline import stage_shapes
    from gradcheck_dist.trainer.stages import AccumulatingStage

    class AddingStage(AccumulatingStage):
        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
            if self.is_last:
                kept: dict[int, Tensor] = self.__dict__.setdefault("kept", {})
                (grad,) = self.bwd_cache[bwd_chunk_id]
                assert grad is not None
                kept[bwd_chunk_id] = grad + kept[bwd_chunk_id] if bwd_chunk_id in kept else grad
                self.bwd_cache[bwd_chunk_id] = (kept[bwd_chunk_id],)

    return AddingStage(part, index, config.num_stages, device, group=group, **stage_shapes(index, config))


FAULTS = (
    Fault(
        "keeps-the-last-pass",
        "Every pass is taken for the step's only one, and its gradient replaces what was there. The last accumulation "
        "step weighs 1, all others 0.",
        "gradcheck_dist.trainer.parallelize:sync_context",
        keep_the_last,
    ),
    Fault(
        "unscaled-twice",
        "The loss scale S is taken out for a wrapper around the optimizer, and for the optimizer in it once more. "
        "Every weight is 1/S.",
        "gradcheck_dist.trainer.precision:unscale",
        unscale_the_wrapper,
    ),
    Fault(
        "input-gradients-add-up",
        "The last pipeline stage adds the gradients of a microbatch's input to those that this input's buffer had "
        "before. Earlier stages differentiate sums from the second accumulation step on; the last stage is right.",
        "gradcheck_dist.trainer.pipeline:build_stage",
        never_empty_inputs,
    ),
)
