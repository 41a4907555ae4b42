"""Losses that no wrapper saw: found in the autograd graph when backward begins.

A cross-entropy that was imported before the probes came, log-probabilities picked by an index, logsumexp minus the
picked logit, soft targets against log_softmax, a function that was given labels: all leave nodes in the graph behind
the backward root (torch.autograd.graph.Node), and a hook on such a node sees the gradient that arrives there. What is
left is a loss of another kind (mean squared error, a custom function): it is recorded without a number of tokens, so
that its gradients can still be compared with one another.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import Loss, LossGradient, Site
from gradcheck_dist.probes import autograd, log_probs, means
from gradcheck_dist.probes.label_functions import LABELLED, Labelled, is_labelled
from gradcheck_dist.probes.loss import gradient_arrived, label_hash, number
from gradcheck_dist.probes.loss_terms import MAX_NODES, End, uncounted_terms, watch_terms
from gradcheck_dist.probes.patching import Patches
from gradcheck_dist.probes.recorder import BackwardPass, Recorder, guarded

_REDUCTIONS = ("none", "mean", "sum")  # torch.nn._reduction.get_enum
_PICKS = {"GatherBackward": "_saved_index", "IndexBackward": "_saved_indices", "TakeBackward": "_saved_index"}
_OTHERS = {
    "MseLossBackward": "mse_loss",
    "SmoothL1LossBackward": "smooth_l1_loss",
    "HuberLossBackward": "huber_loss",
    "BinaryCrossEntropyBackward": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward": "binary_cross_entropy_with_logits",
    "KlDivBackward": "kl_div",
    "LogSigmoidBackward": "logsigmoid",
    "CtcLossBackward": "ctc_loss",
    "SoftMarginLossBackward": "soft_margin_loss",
    "MultiMarginLossBackward": "multi_margin_loss",
}
_CURVED = {
    *("ExpBackward", "LogBackward", "Log1PBackward", "PowBackward", "SqrtBackward", "SigmoidBackward", "TanhBackward"),
    *("SoftplusBackward", "LogSigmoidBackward", "SoftmaxBackward", "LogSoftmaxBackward", "LogsumexpBackward"),
}
"""Between a loss and the root: what such a node passes on depends on the loss itself."""
_PRODUCTS = {"MulBackward", "DivBackward"}
_MODEL = {"AddmmBackward", "MmBackward", "BmmBackward", "ConvolutionBackward", "NativeLayerNormBackward"}


def install(recorder: Recorder, patches: Patches) -> None:
    passes = means.Passes()

    def begin(recorder: Recorder, current: BackwardPass, roots: Sequence[Tensor], has_gradients: bool) -> None:
        look(recorder, current, roots, has_gradients, passes)

    def end(recorder: Recorder, current: BackwardPass) -> None:
        nothing_seen(recorder, current)
        passes.close()

    autograd.OPEN_LISTENERS.append(begin)
    autograd.CLOSE_LISTENERS.append(end)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(end))


class _Found:
    """What the graph behind a root shows. `picks` are elements taken by an index, with the node that they are from."""

    def __init__(self) -> None:
        self.known = 0
        self.cross_entropies: list[Any] = []
        self.picks: list[tuple[Any, Any]] = []
        self.log_softmaxes: list[Any] = []
        self.labelled: list[Any] = []
        self.logsumexp_inputs: set[Any] = set()
        self.others: list[str] = []
        self.losses: list[Any] = []
        self.above: dict[Any, list[Any]] = {}  # from a node to those that its output goes into

    def is_computed(self) -> bool:
        """Whether a loss is multiplied, on its way to the root, by something that has a gradient itself (a learned
        weight, a focal factor), or goes through a curve: its weight is a function of the data then."""
        queue, visited = deque(self.losses), set[Any]()
        while queue:
            for node in self.above.get(queue.popleft(), ()):
                if node in visited:
                    continue
                visited.add(node)
                operands = [following for following, _ in node.next_functions if following is not None]
                if _name(node) in _CURVED or (_name(node) in _PRODUCTS and len(operands) > 1):
                    return True
                queue.append(node)
        return False


@guarded("unseen")
def look(
    recorder: Recorder, current: BackwardPass, roots: Sequence[Tensor], has_gradients: bool, passes: means.Passes
) -> None:
    """Watch for the losses behind the roots of a backward pass that no wrapper has seen."""
    found = _search(roots)
    for node in found.cross_entropies:
        _watch_cross_entropy(recorder, node)
    for node in found.labelled:
        _watch_labelled(recorder, node)
    picks = len(found.labelled)
    for node, source in found.picks:
        if _name(source) == "LogSoftmaxBackward":
            _watch_picks(recorder, node, "log_softmax index")
        elif source in found.logsumexp_inputs:
            _watch_picks(recorder, node, "logsumexp index")
        else:
            continue
        picks += 1
    soft = found.log_softmaxes
    if not (found.known or found.cross_entropies or picks) and len(soft) == 1 and not found.others:
        _watch_soft_targets(recorder, soft.pop())
    current.other_losses += len(found.others) + len(soft)
    if (found.known or found.cross_entropies or picks) and len(roots) == 1:
        terms = uncounted_terms(roots[0], _name, functools.partial(_end, found))
        current.other_losses += len(terms.others)
        watch_terms(recorder, current, [*terms.others, *terms.named], _op)
    current.computed = found.is_computed()
    if not has_gradients and len(roots) == 1 and roots[0].numel() == 1:
        current.root_loss = ", ".join(dict.fromkeys(found.others)) or "unknown"
        if not (current.computed or found.known or picks):
            means.watch(current, roots[0].grad_fn, passes, _name, _OTHERS)


def _search(roots: Sequence[Tensor]) -> _Found:
    found = _Found()
    queue = deque(root.grad_fn for root in roots)
    visited: set[Any] = set()

    def descend(node: Any) -> None:
        for following, _ in node.next_functions:
            found.above.setdefault(following, []).append(node)
            queue.append(following)

    while queue and len(visited) < MAX_NODES:
        node = queue.popleft()
        if node is None or node in visited:
            continue
        visited.add(node)
        if autograd.is_recorded(node):
            found.known += 1
            found.losses.append(node)
            continue
        if is_labelled(node):
            found.labelled.append(node)
            found.losses.append(node)
            continue
        name = _name(node)
        if name in ("NllLossBackward", "NllLoss2DBackward"):
            found.cross_entropies.append(node)
            found.losses.append(node)
        elif name in _PICKS:
            source = _source(node)
            found.picks.append((node, source))
            if _name(source) != "LogSoftmaxBackward":
                descend(node)
            else:
                found.losses.append(node)
        elif name == "LogSoftmaxBackward":
            found.log_softmaxes.append(node)
        elif name == "LogsumexpBackward":
            found.logsumexp_inputs |= _normalised(_source(node))
        elif name in _OTHERS:
            found.others.append(_OTHERS[name])
            if name in _CURVED:
                descend(node)
        elif name not in _MODEL:
            descend(node)
    return found


_COUNTED = {"NllLossBackward", "NllLoss2DBackward", "LogSoftmaxBackward", "LogsumexpBackward"}


def _end(found: _Found, node: Any) -> End | None:
    """What a node is; None: that is to be seen behind it."""
    name = _name(node)
    if _is_squared_logsumexp(node):
        return End.MODEL
    if (
        autograd.is_recorded(node)
        or LABELLED in node.metadata
        or name in _COUNTED
        or (name in _PICKS and _source(node) in found.logsumexp_inputs)
    ):
        return End.COUNTED
    if name in _OTHERS:
        return End.NAMED
    return End.MODEL if name in _MODEL else None


def _is_squared_logsumexp(node: Any) -> bool:
    """Whether a node squares a logsumexp: a z-loss (ST-MoE, arXiv 2202.08906), and no half of a cross-entropy."""
    if _name(node) not in ("PowBackward", "MulBackward"):
        return False
    operands = [_seen_through(following) for following, _ in node.next_functions]
    return bool(operands) and all(_name(operand) == "LogsumexpBackward" for operand in operands)


def _name(node: Any) -> str:
    return node.name().rpartition("::")[2].rstrip("0123456789") if node is not None else ""


def _op(node: Any) -> str:
    """The operation that a node differentiates, in words."""
    name = _name(node)
    return _OTHERS.get(name) or name.removesuffix("Backward").lower()


def _source(node: Any) -> Any:
    """The node that made a node's first input, seen through views and copies."""
    return _seen_through(node.next_functions[0][0]) if node is not None and node.next_functions else None


def _seen_through(node: Any) -> Any:
    for _ in range(log_probs.MAX_HOPS):
        if not _name(node).startswith(log_probs.PASS_THROUGH) or not node.next_functions:
            break
        node = node.next_functions[0][0]
    return node


def _normalised(source: Any) -> set[Any]:
    """What a logsumexp normalises: its input, or the pieces that this was put together from (logits of candidates from
    several places)."""
    if _name(source) != "CatBackward":
        return {source}
    return {source, *(_seen_through(piece) for piece, _ in source.next_functions)}


def _watch_cross_entropy(recorder: Recorder, node: Any) -> None:
    target, reduction = node._saved_target, _REDUCTIONS[node._saved_reduction]
    valid = target != node._saved_ignore_index
    counted = valid.sum()
    num_tokens: int | Tensor = int(counted) if counted.device.type == "cpu" else counted
    loss_id = _evaluated(recorder, "nll_loss", reduction, target, num_tokens)
    arrived = functools.partial(
        gradient_arrived,
        recorder,
        loss_id=loss_id,
        num_tokens=num_tokens,
        reduction=reduction,
        is_main=True,
        valid=valid if reduction == "none" else None,
    )
    _hook(node, arrived)


def _watch_picks(recorder: Recorder, node: Any, op: str) -> None:
    saved = getattr(node, _PICKS[_name(node)])
    labels = saved if isinstance(saved, Tensor) else saved[-1]
    loss_id = _evaluated(recorder, op, "none", labels, None)
    _hook(node, functools.partial(log_probs.gradient_arrived, recorder, loss_id=loss_id))


def _watch_labelled(recorder: Recorder, node: Any) -> None:
    given: Labelled = node.metadata[LABELLED]
    loss_id = _evaluated(recorder, given.op, "none", given.labels, None, given.site)

    def arrived(grad: Tensor) -> None:
        weights = torch.where(given.left_out, 0, -given.sign * grad.detach())
        log_probs.gradient_arrived(recorder, weights, loss_id=loss_id)

    _hook(node, arrived, given.output)


def _watch_soft_targets(recorder: Recorder, node: Any) -> None:
    """Where targets sum to 1 over the classes, the gradients that arrive at log-probabilities sum to -weight."""
    loss_id = _evaluated(recorder, "log_softmax", "none", None, None)
    dim = node._saved_dim if node._saved_dim < 2**63 else node._saved_dim - 2**64
    _hook(node, lambda grad: log_probs.gradient_arrived(recorder, grad.sum(dim), loss_id=loss_id))


def _hook(node: Any, arrived: Callable[[Tensor], None], index: int = 0) -> None:
    def before(grads: tuple[Tensor | None, ...]) -> None:
        handle.remove()  # a graph that is kept and run again is found again
        gradient = grads[index]
        if gradient is not None:
            arrived(gradient)

    handle = node.register_prehook(before)


def _evaluated(
    recorder: Recorder,
    op: str,
    reduction: str,
    labels: Tensor | None,
    num_tokens: int | Tensor | None,
    site: Site | None = None,
) -> int:
    loss_id = recorder.next_seq()
    recorder.emit(
        Loss,
        seq=loss_id,
        site=site or (recorder.current.site if recorder.current is not None else None),
        loss_id=loss_id,
        op=op,
        reduction=reduction,
        num_tokens=num_tokens,
        num_labels=labels.numel() if labels is not None else None,
        label_hash=label_hash(labels) if labels is not None else None,
    )
    if recorder.impulses is not None and labels is not None:
        recorder.label_hashes[loss_id] = label_hash(labels)
    return loss_id


@guarded("unseen")
def nothing_seen(recorder: Recorder, current: BackwardPass) -> None:
    """A scalar was differentiated and no loss below it was recognised: the root itself is taken down as the loss."""
    for handle in current.handles:
        handle.remove()
    if current.root_loss is None or not current.touched or recorder.loss_seen_in == current.seq:
        return
    loss_id = _evaluated(recorder, current.root_loss, "unknown", None, None)
    recorder.emit(
        LossGradient,
        site=current.site,
        loss_id=loss_id,
        accumulation_step=recorder.accumulation_step,
        microbatch=current.microbatch,
        weight=1.0,
        stage=current.stage,
        other_losses=0,
        mean_weight=None if current.mean_weight is None else number(current.mean_weight),
        num_factors=current.num_factors,
    )
