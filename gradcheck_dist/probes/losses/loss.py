"""Losses: on how many tokens, and with what weight per token they enter backward.

`F.cross_entropy` and `F.nll_loss` are replaced (nn.CrossEntropyLoss and a later `from ... import` are caught too). A
hook on the node of the result sees the gradient that hooks on the tensor leave: for reduction "mean" over n valid
labels that gradient divided by n is one token's weight, for "sum" it is the weight itself.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from gradcheck_dist.events import Loss, LossGradient, Site
from gradcheck_dist.probes.losses.sequences import sequences
from gradcheck_dist.probes.losses.tokens import labels_seen
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_transformed
from gradcheck_dist.probes.recording import perhaps
from gradcheck_dist.probes.recording.backward_pass import BackwardPass, TokenWeights
from gradcheck_dist.probes.recording.deferred import number
from gradcheck_dist.probes.recording.marks import mark_recorded
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.sites import caller_site, calls
from gradcheck_dist.stats import memory
from gradcheck_dist.trace.label_hashes import HASH_FACTOR, HASH_OFFSET


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
        class_weight = kwargs.get("weight", args[0] if args else None)
        evaluated(recorder, output, target, op, ignore_index, reduction, class_weight)
        return output

    return loss


def label_hash(target: Tensor) -> int | Tensor:
    """A checksum of the labels: ranks that evaluate the same labels are one data coordinate. On an accelerator it stays
    there, as a 0-d int64 tensor."""
    local = getattr(target, "_local_tensor", target).detach()
    if is_host(local):
        return zlib.crc32(memory.flat(local).data)
    position = torch.arange(local.numel(), device=local.device) * HASH_FACTOR + HASH_OFFSET
    return ((local.reshape(-1).to(torch.int64) + 1) * position).sum()


@guarded("loss")
def evaluated(
    recorder: Recorder,
    output: Tensor,
    target: Tensor,
    op: str,
    ignore_index: int,
    reduction: str,
    class_weight: Tensor | None = None,
    **of_stand_in: Any,
) -> None:
    if is_transformed(output):
        return
    if output.requires_grad:
        recorder.ensure_step()
    if not recorder.recording or is_inside_of_a_loss(recorder):
        return
    valid: Tensor | None = None
    num_tokens: int | Tensor
    if target.is_floating_point():
        num_tokens = target.shape[0]
    elif type(target) is Tensor and is_host(target) and class_weight is None and reduction != "none":
        num_tokens = int(np.count_nonzero(memory.flat(target) != ignore_index))  # one call where torch takes three
    else:
        valid = target != ignore_index
        num_tokens = int(valid.sum()) if is_host(valid) else valid.sum()
    weighted = None
    if class_weight is not None and valid is not None:
        weighted = (class_weight.detach()[torch.where(valid, target, 0)] * valid).sum()
    record_loss(
        recorder,
        output,
        num_tokens,
        reduction=reduction,
        op=op,
        labels=target,
        valid=valid,
        weighted=weighted,
        **of_stand_in,
    )


def is_inside_of_a_loss(recorder: Recorder) -> bool:
    """Whether the backward of a function that is a loss itself is under way."""
    return recorder.current is not None and recorder.current.inside_losses > 0


def record_loss(
    recorder: Recorder,
    output: Tensor,
    num_tokens: int | Tensor,
    *,
    reduction: str,
    op: str,
    term: str = "main",
    labels: Tensor | None = None,
    coefficient: float | None = None,
    valid: Tensor | None = None,
    weighted: Tensor | None = None,
    site: Site | None = None,
    is_stand_in: bool = False,
    computed_from: Sequence[int] = (),
) -> None:
    """Record a loss tensor and, when a gradient will come, watch for it.

    `valid` tells which elements of an unreduced loss are no ignored labels, `weighted` is the sum of the class weights
    of the labels. `is_stand_in`: the tensor has the gradient of a loss, and not its value; `site` is where that is.

    `computed_from`: recorded losses that this one stands above. They are of the same labels, and no losses of their own
    where its gradient comes.

    A tensor that was recorded before is recorded as the same loss: what is told of it now corrects what was seen.
    """
    seq = recorder.next_seq()
    seen = recorder.losses.get(output)
    if seen is not None:
        recorder.emit(Loss, seq=seq, **seen | {"term": term, "coefficient": coefficient})
        return
    seen = {
        "site": site or caller_site(),
        "loss_id": seq,
        "term": term,
        "coefficient": coefficient,
        "op": op,
        "reduction": reduction,
        "num_tokens": num_tokens,
        "num_labels": labels.numel() if labels is not None else None,
        "label_hash": label_hash(labels) if labels is not None else None,
        "value": number(output) if output.dim() == 0 and not is_stand_in else None,
        "requires_grad": output.requires_grad,
        "dtype": str(output.dtype).removeprefix("torch."),
        "num_weighted_tokens": weighted,
        "called_from": recorder.calls.number(calls()) if site is None else None,
    }
    if computed_from and labels is None:
        seen |= next((recorder.labels[one] for one in computed_from if one in recorder.labels), {})
    recorder.emit(Loss, seq=seq, **seen)
    if recorder.impulses is not None:
        recorder.label_hashes[seq] = seen["label_hash"]
    if output.requires_grad:
        recorder.losses[output] = seen
        recorder.labels[seq] = {name: seen[name] for name in ("num_labels", "label_hash")}
        recorder.covered |= dict.fromkeys(computed_from, seq)
        mark_recorded(output, seq)
        if labels is not None:
            labels_seen(recorder, labels, seq)
        unreduced = valid if reduction == "none" else None
        arrived = functools.partial(gradient_arrived, recorder, loss_id=seq, num_tokens=num_tokens, reduction=reduction)
        hook = functools.partial(arrived, is_main=term == "main", valid=unreduced)
        when_reached(recorder, output, hook)


def when_reached(recorder: Recorder, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient that is left when all hooks on a tensor have run, also those to come."""
    node: Any = tensor.grad_fn
    if node is None:
        tensor.register_hook(unserializable_hook(hook))
        return
    output = tensor.output_nr

    def reached(grads: tuple[Tensor | None, ...]) -> None:
        if (grad := grads[output]) is not None:
            hook(grad)

    node.register_prehook(unserializable_hook(kept_away(recorder, "loss", reached)))


@guarded("loss")
def gradient_arrived(
    recorder: Recorder,
    grad: Tensor,
    *,
    loss_id: int,
    num_tokens: int | Tensor,
    reduction: str,
    is_main: bool,
    valid: Tensor | None = None,
) -> None:
    current = recorder.current
    if not recorder.recording or current is None:
        return
    if recorder.covered.get(loss_id) in current.arrived and loss_id not in current.direct:
        return  # it has its gradient by way of the declared loss alone
    recorder.loss_arrived(current, loss_id)
    if is_main:
        recorder.loss_seen_in = current.seq
    local = getattr(grad, "_local_tensor", grad).detach()
    low: Tensor | None = None
    high: Tensor | None = None
    samples: dict[str, Any] = {}
    if local.numel() == 1:
        weight = number(local.reshape(()))
        if reduction == "mean":
            weight = weight / (num_tokens.clamp_min(1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1))
    else:
        # What is masked out later has no weight and is no token; an ignored label has no loss, whatever its weight.
        used = local != 0
        if valid is not None and valid.shape == local.shape:
            used = used & valid
        weights = torch.where(used, local, 0).double()
        num_tokens = used.sum()
        weight = weights.sum() / num_tokens.clamp_min(1)
        low = torch.where(used, weights, weights.max()).min()
        high = torch.where(used, weights, weights.min()).max()
        samples = sequences(recorder, weights) or {}
    if loss_id in current.smoothed:
        asked = (weight, weight if low is None else low, weight if high is None else high, num_tokens)
        current.smoothed[loss_id] = TokenWeights(*(_wide(value, local.device) for value in asked))
        return
    recorder.emit(
        LossGradient,
        site=current.site,
        loss_id=loss_id,
        accumulation_step=recorder.accumulation_step,
        microbatch=current.microbatch,
        weight=weight,
        weight_min=low,
        weight_max=high,
        num_tokens=num_tokens,
        stage=current.stage,
        other_losses=current.other_losses,
        computed=current.computed,
        whole=current.whole,
        **(samples | current.told_of_elements()),
        **current.told_of_sum(loss_id),
    )


def tell_loss(
    recorder: Recorder,
    op: str,
    reduction: str,
    labels: Tensor | None,
    num_tokens: int | Tensor | None,
    site: Site | None = None,
    known: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    rows: int | None = None,
    **batch: int | None,
) -> int:
    """Record a loss that was found behind its evaluation; returns its id. `known`: whether it is one that counts
    anything, where that is still on an accelerator. `dtype`: what its gradient is rounded to. `rows`: how many labels
    there would be, where there are none. `batch`: fields of a Loss that tell its batch, where there are none."""
    loss_id = recorder.next_seq()
    recorder.emit(
        Loss if known is None else perhaps.loss,
        seq=loss_id,
        site=site or (recorder.current.site if recorder.current is not None else None),
        loss_id=loss_id,
        op=op,
        reduction=reduction,
        num_tokens=num_tokens,
        num_labels=labels.numel() if labels is not None else rows,
        label_hash=label_hash(labels) if labels is not None else None,
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
        **({} if known is None else {"known": known}),
        **batch,
    )
    if recorder.impulses is not None and labels is not None:
        recorder.label_hashes[loss_id] = label_hash(labels)
    if labels is not None:
        labels_seen(recorder, labels, loss_id)
    return loss_id


def tell_whole(recorder: Recorder, current: BackwardPass, loss_id: int, **fields: Any) -> None:
    """Record the gradient of a loss of which the tokens are not known: it weighs 1 as a whole."""
    if current.numbers:
        fields["numbers"] = current.numbers
    recorder.emit(
        LossGradient,
        site=current.site,
        loss_id=loss_id,
        accumulation_step=recorder.accumulation_step,
        microbatch=current.microbatch,
        weight=1.0,
        stage=current.stage,
        **fields,
    )


def _wide(value: float | Tensor, device: torch.device) -> Tensor:
    """A number as a tensor that loses none of its digits, whatever torch's default type is."""
    dtype = torch.float64 if isinstance(value, float) else None
    return torch.as_tensor(value, dtype=dtype, device=device)
