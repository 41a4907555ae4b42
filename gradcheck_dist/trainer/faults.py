"""Known bugs of gradient scale, each put in by replacing ONE named function of the trainer.

The trainer itself has no switch for them. Imports no torch.

Notation: N tokens in a step, N_r of them on data-parallel rank r, n_c in one microbatch, R the data-parallel degree, K
accumulation steps (k counts from 0), M pipeline microbatches. Right is a weight of 1/N for every token.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradcheck_dist.errors import unknown_value

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradcheck_dist.trainer.config import TrainConfig
    from gradcheck_dist.trainer.loss import StepTokens


@dataclass(frozen=True)
class Fault:
    """One injectable bug.

    Attributes:
        story: what the author of such a trainer thought, and the weight relative to 1/N that came of it.
        target: the replaced function, as "module:function".
        replacement: what stands in its place.
    """

    name: str
    story: str
    target: str
    replacement: Callable[..., Any]


def leave_averaging(model: nn.Module, config: TrainConfig) -> None:
    """Stands in for parallelize.combine_gradients."""


def sync_always(model: nn.Module, config: TrainConfig, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Stands in for parallelize.sync_context."""
    return contextlib.nullcontext()


def schedule_always_scales(config: TrainConfig) -> bool:
    """Stands in for parallelize.schedule_scales_gradients."""
    return True


def rank_tokens(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return step.rank_tokens


def microbatch_tokens(labels: Tensor, step: StepTokens) -> float:
    """Stands in for loss.normalizer."""
    return step.contributions * int((labels >= 0).sum())


_FAULTS = (
    Fault(
        "ddp-averages",
        "The loss is divided by the tokens of all ranks, and the data-parallel wrapper still averages over them. "
        "Every weight is 1/R of what it should be.",
        "gradcheck_dist.trainer.parallelize:combine_gradients",
        leave_averaging,
    ),
    Fault(
        "sync-every-backward",
        "no_sync is missing, so DDP reduces in every accumulation step all that has been accumulated so far. Under a "
        "summing hook step k weighs R^(K-1-k); under averaging, or under FSDP2, the bug only costs time.",
        "gradcheck_dist.trainer.parallelize:sync_context",
        sync_always,
    ),
    Fault(
        "schedule-scales-grads",
        "The pipeline schedule takes the mean over its microbatches by dividing the gradients by M, and it divides "
        "those of earlier accumulation steps again each time: step k weighs M^-(K-1-k), on every stage.",
        "gradcheck_dist.trainer.parallelize:schedule_scales_gradients",
        schedule_always_scales,
    ),
    Fault(
        "rank-means",
        "Each rank divides by its own tokens of the step and the wrapper averages over ranks (gradient_reduction "
        "'average'): a mean of means. Tokens of rank r weigh N / (R N_r).",
        "gradcheck_dist.trainer.loss:normalizer",
        rank_tokens,
    ),
    Fault(
        "microbatch-means",
        "The loss is the mean over each microbatch, divided by their number, and the wrapper averages over ranks "
        "(gradient_reduction 'average'). Tokens of microbatch c weigh N / (R K M n_c).",
        "gradcheck_dist.trainer.loss:normalizer",
        microbatch_tokens,
    ),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _FAULTS}


def fault_names() -> list[str]:
    """The names of all injectable faults, sorted."""
    return sorted(FAULTS)


def apply_faults(names: Iterable[str]) -> Callable[[], None]:
    """Put faults into the trainer of this process.

    Args:
        names: names of faults, applied in this order; of two with the same target the later one wins.

    Returns:
        a function that takes them out again.

    Raises:
        GradcheckError: an unknown name.
    """
    chosen = list(names)
    for name in chosen:
        if name not in FAULTS:
            raise unknown_value("fault", name, FAULTS, code="E206")
    undo = contextlib.ExitStack()
    for name in chosen:
        module_name, function = FAULTS[name].target.split(":")
        module = importlib.import_module(module_name)
        undo.callback(setattr, module, function, getattr(module, function))
        setattr(module, function, FAULTS[name].replacement)
    return undo.close
