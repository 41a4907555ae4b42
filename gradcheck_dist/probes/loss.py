"""Losses: on how many tokens, and with what weight per token they enter backward.

`F.cross_entropy` and `F.nll_loss` are replaced (nn.CrossEntropyLoss and a later `from ... import` are caught too). A
tensor hook on the result sees the gradient that arrives there: for reduction "mean" over n valid labels that gradient
divided by n is one token's weight, for "sum" it is the weight itself.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import Loss, LossGradient
from gradcheck_dist.probes.patching import Patches
from gradcheck_dist.probes.recorder import Recorder, guarded
from gradcheck_dist.probes.sites import caller_site


def install(recorder: Recorder, patches: Patches) -> None:
    for name in ("cross_entropy", "nll_loss"):
        make = functools.partial(_watch, recorder, name)
        patches.replace(torch.nn.functional, name, make)


def _watch(recorder: Recorder, op: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or recorder.in_loss or recorder.suspended:
            return original(input, target, *args, **kwargs)
        recorder.in_loss = True
        try:
            output = original(input, target, *args, **kwargs)
        finally:
            recorder.in_loss = False
        # Positional order of both: weight, size_average, ignore_index, reduce, reduction.
        ignore_index = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
        reduction = kwargs.get("reduction", args[4] if len(args) > 4 else "mean")
        evaluated(recorder, output, target, op, ignore_index, reduction)
        return output

    return loss


HASH_FACTOR, HASH_OFFSET = 6364136223846793005, 1442695040888963407  # Knuth's MMIX multiplier and increment


def label_hash(target: Tensor) -> int | Tensor:
    """A checksum of the labels: ranks that evaluate the same labels are one data coordinate. On an accelerator it stays
    there, as a 0-d int64 tensor."""
    local = getattr(target, "_local_tensor", target).detach()
    if local.device.type == "cpu":
        return zlib.crc32(local.contiguous().view(torch.uint8).numpy().tobytes())
    position = torch.arange(local.numel(), device=local.device) * HASH_FACTOR + HASH_OFFSET
    return ((local.reshape(-1).to(torch.int64) + 1) * position).sum()


@guarded("loss")
def evaluated(recorder: Recorder, output: Tensor, target: Tensor, op: str, ignore_index: int, reduction: str) -> None:
    if output.requires_grad:
        recorder.ensure_step()
    if not recorder.recording:
        return
    valid = target != ignore_index if not target.is_floating_point() else None
    num_tokens = valid.sum() if valid is not None else target.shape[0]
    if isinstance(num_tokens, Tensor) and num_tokens.device.type == "cpu":
        num_tokens = int(num_tokens)
    record_loss(recorder, output, num_tokens, reduction=reduction, op=op, labels=target)


def record_loss(
    recorder: Recorder,
    output: Tensor,
    num_tokens: int | Tensor,
    *,
    reduction: str,
    op: str,
    term: str = "main",
    labels: Tensor | None = None,
) -> None:
    """Record a loss tensor and, when a gradient will come, watch for it."""
    loss_id = recorder.next_seq()
    recorder.emit(
        Loss,
        seq=loss_id,
        site=caller_site(),
        loss_id=loss_id,
        term=term,
        op=op,
        reduction=reduction,
        num_tokens=num_tokens,
        num_labels=labels.numel() if labels is not None else None,
        label_hash=label_hash(labels) if labels is not None else None,
        value=output.detach() if output.dim() == 0 else None,
        requires_grad=output.requires_grad,
        dtype=str(output.dtype).removeprefix("torch."),
    )
    if output.requires_grad:
        output.register_hook(lambda grad: gradient_arrived(recorder, grad, loss_id, num_tokens, reduction))


@guarded("loss")
def gradient_arrived(recorder: Recorder, grad: Tensor, loss_id: int, num_tokens: int | Tensor, reduction: str) -> None:
    if not recorder.recording or recorder.current is None:
        return
    recorder.loss_seen_in = recorder.current.seq
    local = getattr(grad, "_local_tensor", grad).detach()
    low: Tensor | None = None
    high: Tensor | None = None
    if local.numel() == 1:
        weight = local.reshape(()).double()
        if reduction == "mean":
            weight = weight / (num_tokens.clamp_min(1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1))
    else:
        used = local != 0
        weight = local.double().sum() / used.sum().clamp_min(1)
        low = torch.where(used, local, torch.inf).min().double()
        high = torch.where(used, local, -torch.inf).max().double()
    recorder.emit(
        LossGradient,
        site=recorder.current.site,
        loss_id=loss_id,
        accumulation_step=recorder.accumulation_step,
        microbatch=recorder.current.microbatch,
        weight=weight,
        weight_min=low,
        weight_max=high,
        num_tokens=num_tokens,
        stage=recorder.current.stage,
    )
