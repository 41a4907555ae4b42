"""Losses written by hand as log-probabilities of the labels: log_softmax and gather.

The gradient that arrives at a picked log-probability is minus the weight of that token's loss. Labels that are masked
away later get a zero gradient, so the valid tokens are counted in backward.

nn.AdaptiveLogSoftmaxWithLoss (torch/nn/modules/adaptive.py) picks twice for a token of a rare class: its cluster, and
the class within. What counts is the sum, one for each token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from gradcheck_dist.events import Loss, LossGradient
from gradcheck_dist.probes.losses.loss import is_inside_of_a_loss, label_hash, when_reached
from gradcheck_dist.probes.losses.sequences import sequences
from gradcheck_dist.probes.losses.tokens import labels_seen
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_transformed
from gradcheck_dist.probes.recording import perhaps
from gradcheck_dist.probes.recording.backward_pass import BackwardPass, TokenWeights
from gradcheck_dist.probes.recording.marks import PICKED, mark_recorded, mark_several
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

MAX_HOPS = 6
ALIKE = 0.01
"""Relative difference of weights that are one, rounded to bfloat16."""
PASS_THROUGH = (
    *("View", "Reshape", "Unsafe", "Slice", "Select", "IndexSelect", "Squeeze", "Unsqueeze", "ToCopy", "Clone"),
    "Alias",
)
KEPT_FROM_ZERO = ("AddBackward", "ClampBackward", "ClampMinBackward")
LINEAR = (
    *PASS_THROUGH,
    *("Sum", "Mean", "Neg", "Add", "Sub", "Mul", "Div", "MaskedFill", "Where", "Index", "Gather", "MaskedSelect"),
)
"""What passes a multiple of its input on, by the begin of a node's name; products of two gradients are none."""


def install(recorder: Recorder, patches: Patches) -> None:
    clusters = Clusters()
    for owner in (torch, Tensor):
        patches.replace(owner, "gather", lambda original: _watch_gather(recorder, clusters, original))
    patches.replace(
        nn.AdaptiveLogSoftmaxWithLoss, "forward", lambda original: _watch_clusters(recorder, clusters, original)
    )


@dataclass
class Clusters:
    """Whether log-probabilities are picked inside of an adaptive softmax, which adds them up."""

    inside: bool = False


def _watch_clusters(recorder: Recorder, clusters: Clusters, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, input_: Tensor, target_: Tensor) -> Any:
        if torch.compiler.is_compiling() or not recorder.records_upcoming or recorder.suspended or target_.dim() != 1:
            return original(self, input_, target_)
        clusters.inside = True
        try:
            result = original(self, input_, target_)
        finally:
            clusters.inside = False
        if result.output.requires_grad:
            evaluated(recorder, result.output, target_, "adaptive log_softmax")
        return result

    return forward


def _watch_gather(recorder: Recorder, clusters: Clusters, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def gather(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function((input,)):  # of which a class or mode may know torch's function by its identity
            picked = handle_torch_function(original, (input,), input, *args, **kwargs)
        else:
            picked = original(input, *args, **kwargs)
        if torch.compiler.is_compiling() or not recorder.records_upcoming or recorder.suspended or clusters.inside:
            return picked
        if picked.requires_grad:
            dim = kwargs.get("dim", args[0] if args else 0)
            gathered(recorder, input, picked, kwargs.get("index", args[1] if len(args) > 1 else None), dim)
        return picked

    return gather


@guarded("log_probs")
def gathered(recorder: Recorder, source: Tensor, picked: Tensor, labels: Tensor | None, dim: int) -> None:
    if is_log_softmax(source):
        several = labels is not None and labels.dim() > 0 and labels.size(dim) > 1
        evaluated(recorder, picked, labels, "log_softmax gather", dim if several else None)
    elif _is_negated(source):
        # It is found when backward begins, beside the rest of a smoothed loss, of which this is the line.
        node: Any = picked.grad_fn
        node.metadata[PICKED] = caller_site()


def _is_negated(source: Tensor) -> bool:
    """Whether a tensor is a negated log_softmax."""
    node = source.grad_fn
    return (
        node is not None and node.name().startswith("NegBackward") and _made_by_log_softmax(node.next_functions[0][0])
    )


def is_log_softmax(tensor: Tensor) -> bool:
    """Whether a tensor is the result of log_softmax, or a softmax's logarithm (with what keeps it from zero), seen
    through views, slices and copies."""
    return _made_by_log_softmax(tensor.grad_fn)


def _made_by_log_softmax(node: Any) -> bool:
    logged = False
    for _ in range(MAX_HOPS):
        if node is None:
            return False
        name = node.name().rpartition("::")[2]
        if name.startswith("LogSoftmaxBackward") or (logged and name.startswith("SoftmaxBackward")):
            return True
        below = [following for following, _ in node.next_functions if following is not None]
        is_log = name.startswith("LogBackward") and not logged
        if len(below) != 1 or not (is_log or name.startswith((*PASS_THROUGH, *(KEPT_FROM_ZERO if logged else ())))):
            return False
        node, logged = below[0], logged or is_log
    return False


@guarded("log_probs")
def evaluated(
    recorder: Recorder, log_probs: Tensor, labels: Tensor | None, op: str, classes: int | None = None
) -> None:
    """`classes`: the dimension along which several classes of one token were picked."""
    recorder.ensure_step()
    if not recorder.recording or is_transformed(log_probs) or is_inside_of_a_loss(recorder):
        return
    loss_id = recorder.next_seq()
    known = {"num_labels": labels.numel(), "label_hash": label_hash(labels)} if labels is not None else {}
    recorder.labels[loss_id] = known
    recorder.emit(
        Loss,
        seq=loss_id,
        site=caller_site(),
        loss_id=loss_id,
        op=op,
        reduction="none",
        **known,
        dtype=str(log_probs.dtype).removeprefix("torch."),
    )
    if recorder.impulses is not None and labels is not None:
        recorder.label_hashes[loss_id] = known["label_hash"]
    if labels is not None:
        labels_seen(recorder, labels, loss_id)
    mark_recorded(log_probs, loss_id)
    if classes is not None:
        mark_several(log_probs)
    when_reached(recorder, log_probs, functools.partial(gradient_arrived, recorder, loss_id=loss_id, classes=classes))


@guarded("log_probs")
def gradient_arrived(
    recorder: Recorder,
    grad: Tensor,
    loss_id: int,
    known: Tensor | None = None,
    class_scale: float | None = None,
    classes: int | None = None,
) -> None:
    """`known`: whether the gradient tells what each token weighs, where that is still on an accelerator."""
    current = recorder.current
    if not recorder.recording or current is None:
        return
    if recorder.loss_seen_in == current.seq and loss_id not in current.direct:
        return  # a loss that was declared (mark_loss), or seen otherwise, stands above this one
    current.root_loss = None
    recorder.loss_arrived(current, loss_id)
    of_tokens = -getattr(grad, "_local_tensor", grad).detach().double()
    if classes is not None and _are_apart(of_tokens):
        of_tokens = of_tokens.sum(classes)
        current.computed = current.computed or _are_apart(of_tokens)
    weights = summary(of_tokens)
    if loss_id in current.smoothed:
        current.smoothed[loss_id] = weights
    else:
        samples = sequences(recorder, of_tokens) or {}
        samples |= {"class_scale": class_scale}
        emit_weights(recorder, current, weights, loss_id, other_losses=current.other_losses, known=known, **samples)


def _are_apart(weights: Tensor) -> bool:
    """Whether a teacher's probabilities weigh a token's classes, of which only the likeliest were picked: labels weigh
    alike. Together such classes have no one weight, either, but what the loss's mean or sum goes over has. An
    accelerator's numbers are not read."""
    used = weights[weights != 0] if is_host(weights) else weights.new_empty(0)
    return bool(len(used)) and bool(used.max() - used.min() > ALIKE * used.abs().max())


def without_rounding(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of numbers that were rounded to `dtype`, one a token, as their mean where no more than that parts them."""
    mean = weights.sum() / (weights != 0).sum().clamp_min(1)
    return torch.where((weights - mean).abs() <= torch.finfo(dtype).eps * mean.abs(), mean, weights)


def summary(weights: Tensor) -> TokenWeights:
    """Of one float64 number a token; zero is no token."""
    used = weights != 0
    num_tokens = used.sum()
    return TokenWeights(
        weights.sum() / num_tokens.clamp_min(1),
        torch.where(used, weights, weights.max()).min(),
        torch.where(used, weights, weights.min()).max(),
        num_tokens,
    )


def emit_weights(
    recorder: Recorder,
    current: BackwardPass,
    weights: TokenWeights,
    loss_id: int,
    *,
    other_losses: int | Tensor,
    label_share: Tensor | None = None,
    known: Tensor | None = None,
    **samples: Any,
) -> None:
    recorder.emit(
        LossGradient if known is None else perhaps.loss_gradient,
        site=current.site,
        loss_id=loss_id,
        accumulation_step=recorder.accumulation_step,
        microbatch=current.microbatch,
        weight=weights.mean,
        weight_min=weights.low,
        weight_max=weights.high,
        num_tokens=weights.num_tokens,
        stage=current.stage,
        other_losses=other_losses,
        computed=current.computed,
        label_share=label_share,
        whole=current.whole,
        **(samples | current.told_of_elements() | ({} if known is None else {"known": known})),
        **current.told_of_sum(loss_id),
    )
