"""A loss that the user declares (mark_loss). What is wrong with it is told in the trace and ends no training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.probes.losses.loss import record_loss
from gradcheck_dist.probes.losses.loss_graph import search
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.marks import RECORDED
from gradcheck_dist.probes.recording.recorder import Recorder, guarded


@guarded("mark_loss")
def mark(
    recorder: Recorder,
    loss: Tensor,
    num_tokens: int | Tensor,
    term: str,
    labels: Tensor | None,
    coefficient: float | None,
) -> None:
    """Record a declared loss; the arguments are those of mark_loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{type(loss).__name__} {loss!r}"
        )
        raise _illegal("loss", given, "tensors of one element", "mark_loss(losses.sum(), num_tokens)")
    if not isinstance(term, str) or not term:
        raise _illegal("term", repr(term), "names", 'term="balance"')
    if labels is not None and not isinstance(labels, Tensor):
        raise _illegal("labels", f"a {type(labels).__name__}", "tensors", "labels=torch.as_tensor(labels)")
    if loss.requires_grad:
        recorder.ensure_step()
    if not recorder.recording:
        return
    record_loss(
        recorder,
        loss,
        _count(num_tokens),
        reduction="sum",
        op="mark_loss",
        term=term,
        labels=labels,
        coefficient=_factor(coefficient),
        computed_from=() if loss in recorder.losses else _computed_from(loss),
    )


def _computed_from(loss: Tensor) -> Sequence[int]:
    """Recorded losses that a declared one is computed from, as the sum of weighted token losses is."""
    return [node.metadata[RECORDED] for node in search([loss]).known] if loss.requires_grad else ()


def _count(num_tokens: object) -> int | Tensor:
    """As an int, or as a 0-d int64 tensor where reading it would wait for an accelerator."""
    if isinstance(num_tokens, Tensor) and num_tokens.numel() == 1 and not is_host(num_tokens):
        return num_tokens.detach().reshape(()).clamp_min(0).to(torch.int64)
    count = _number(num_tokens)
    if count is None or not count.is_integer() or count < 0:
        raise _illegal("num_tokens", repr(num_tokens), "whole numbers from 0 up", "num_tokens=int(mask.sum())")
    return int(count)


def _factor(coefficient: object) -> float | None:
    factor = _number(coefficient)
    if coefficient is not None and (factor is None or not math.isfinite(factor)):
        raise _illegal("coefficient", repr(coefficient), "finite numbers", "coefficient=0.01")
    return factor


def _number(given: object) -> float | None:
    """Text and truth values convert to numbers too, but nobody means them."""
    if isinstance(given, Tensor) and given.numel() == 1:
        given = given.item()
    return float(given) if isinstance(given, int | float | np.number) and not isinstance(given, bool) else None


def _illegal(argument: str, given: str, legal: str, example: str) -> GradcheckError:
    return GradcheckError(
        f"this loss is not marked: {argument} is {given[:80]}; legal are {legal}. Try {example}.", code="E303"
    )
