"""Losses that no wrapper saw: found in the autograd graph when backward begins.

A cross-entropy that was imported before the probes came, log-probabilities picked by an index, logsumexp minus the
picked logit, soft targets against log_softmax, a function that was given labels: all leave nodes in the graph behind
the backward root (torch.autograd.graph.Node), and a hook on such a node sees the gradient that arrives there. What is
left is a loss of another kind (mean squared error, a custom function): it is recorded without a number of tokens, so
that its gradients can still be compared with one another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import FUNCTION, RootValue
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses import batches, by_gradient, heads, label_smoothing, log_probs, means, numbers
from gradcheck_dist.probes.losses.label_functions import Labelled
from gradcheck_dist.probes.losses.loss import gradient_arrived, is_inside_of_a_loss, tell_loss, tell_whole
from gradcheck_dist.probes.losses.loss_graph import (
    PICKS,
    Found,
    dim_of,
    dtype_of,
    function_of,
    name_of,
    rows_of,
    search,
)
from gradcheck_dist.probes.losses.loss_terms import emit_term, uncounted_terms, watch_terms
from gradcheck_dist.probes.losses.reductions import leads_to
from gradcheck_dist.probes.losses.same_logits import on_same_logits
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.deferred import number
from gradcheck_dist.probes.recording.marks import LABELLED, PICKED, RECORDED, TOLD, has_several
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded, kept_away

_OF_ITS_INPUT = -1  # in the place of an output's number: a loss that a node makes of what it is given
_REDUCTIONS = ("none", "mean", "sum")  # torch.nn._reduction.get_enum


def install(recorder: Recorder, patches: Patches) -> None:
    batches.install(recorder, patches)  # is told of a pass before its losses are looked for
    numbers.install(recorder, patches)
    passes = means.Passes()

    def begin(recorder: Recorder, current: BackwardPass, roots: Sequence[Root], has_gradients: bool) -> None:
        look(recorder, current, roots, has_gradients, passes)

    def end(recorder: Recorder, current: BackwardPass) -> None:
        nothing_seen(recorder, current)
        passes.close(current)

    autograd.OPEN_LISTENERS.append(begin)
    autograd.CLOSE_LISTENERS.append(end)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(end))


@guarded("unseen")
def look(
    recorder: Recorder, current: BackwardPass, roots: Sequence[Root], has_gradients: bool, passes: means.Passes
) -> None:
    """Watch for the losses behind the roots of a backward pass that no wrapper has seen."""
    if is_inside_of_a_loss(recorder):
        return
    if recorder.sampling and len(roots) == 1:
        current.numbers = numbers.numbers_before(roots[0])
    found = search(roots)
    ids = {node: node.metadata[RECORDED] for node in found.known}
    ids |= {node: _watch_cross_entropy(recorder, node) for node in found.cross_entropies}
    current.direct.update(_watch_labelled(recorder, node) for node in found.labelled)
    picks = len(found.labelled)
    for node, source in found.picks:
        if name_of(source) == "LogSoftmaxBackward":
            ids[node] = _watch_picks(recorder, node, "log_softmax index")
        elif source in found.logsumexp_inputs:
            current.direct.add(_watch_picks(recorder, node, "logsumexp index"))
        else:
            continue
        picks += 1
    for part, source in label_smoothing.smoothed_losses(found, ids).items():
        if part not in ids:
            ids[part] = _watch_picks(recorder, part, "log_softmax index")
            picks += 1
        found.log_softmaxes.remove(source)
        label_smoothing.watch_whole(recorder, current, source, ids[part], functools.partial(_hook, recorder))
    current.direct.update(ids.values())
    if len(ids) > 1:
        current.part_of = heads.parts_of_one(ids) if recorder.sampling else {}
        current.logits = on_same_logits(ids)
    for node in found.largest if recorder.sampling else ():
        if (loss := leads_to((node, 0), ids)) is not None:
            _hook(recorder, node, functools.partial(_count_picked, current, ids[loss]))
    soft, own = found.log_softmaxes, list[Any]()
    if not (found.known or found.cross_entropies or picks) and len(soft) == 1 and not found.others:
        own.append(soft[-1])
        current.soft = True
        _watch_soft_targets(recorder, soft.pop(), found)
    current.other_losses += len(found.others) + len(soft)
    if (found.known or found.cross_entropies or picks) and len(roots) == 1:
        terms = uncounted_terms(roots[0], found)
        current.other_losses += len(terms.others)
        watch_terms(recorder, current, [*terms.others, *terms.named])
        if current.other_losses or len(found.losses) > 1:
            means.watch_whole(recorder, current, roots[0], ids)
    current.computed = found.is_computed(own)  # also where targets are the model's own, as those of a reverse KL are
    if len(roots) == 1 and not found.losses:
        by_gradient.begins_at(roots[0])
    if len(roots) == 1 and _is_loss(recorder, roots[0], has_gradients):
        function = function_of(roots[0].grad_fn)
        nameless = f"{FUNCTION}{function}" if function else "unknown"
        current.root_edge = roots[0].grad_fn, roots[0].output_nr
        current.root_loss = ", ".join(dict.fromkeys(found.others)) or nameless
        if current.computed or not (found.known or picks) or any(map(has_several, found.known)):
            means.watch(recorder, current, roots[0], passes)
        elif recorder.sampling:
            means.watch_weighted(recorder, current, roots[0], ids)
        counts_nothing = not (found.known or found.cross_entropies or picks)
        if counts_nothing and current.inputs is not None:
            current.targets = batches.targets_of(found.of_others, roots[0].grad_fn)
        if counts_nothing or not current.other_losses:
            _tell_value(recorder, current, roots[0])


def _count_picked(current: BackwardPass, loss_id: int, grad: Tensor) -> None:
    """Count the elements of a loss that are among its largest, and that enter what follows."""
    here = (getattr(grad, "_local_tensor", grad) != 0).sum()
    current.picked[loss_id] = current.picked[loss_id] + here if loss_id in current.picked else here


def _is_loss(recorder: Recorder, root: Root, has_gradient: bool) -> bool:
    """Whether a pass begins at a loss. Zero-bubble schedules of torch's give that of their last stage a gradient of
    ones, and what stages hand to one another has dimensions."""
    return root.shape == () and recorder.in_pipeline if has_gradient else root.numel() == 1


def _tell_value(recorder: Recorder, current: BackwardPass, root: Root) -> None:
    """Record what a pass begins at, where that is one loss: ranks that compute it together have one value of it."""
    plain = type(root) is Tensor and root.is_floating_point()
    if plain and recorder.sampling and recorder.impulses is None:
        assert isinstance(root, Tensor)
        recorder.emit(
            RootValue,
            accumulation_step=recorder.accumulation_step,
            microbatch=current.microbatch,
            site=current.site,
            value=number(root),
        )


def _told_once(
    recorder: Recorder, node: Any, op: str, reduction: str, *fields: Any, output: int = 0, **known: Any
) -> int:
    """The id of a loss that is recorded now, or was when an earlier pass of the step differentiated it."""
    told = {} if node is None else node.metadata.setdefault(TOLD, {})  # a parameter may be the loss
    if told.get(output, (None, 0))[0] != recorder.step:
        known = {"dtype": None if node is None else dtype_of(node, output)} | known
        told[output] = recorder.step, tell_loss(recorder, op, reduction, *fields, **known)
    return int(told[output][1])


def _watch_cross_entropy(recorder: Recorder, node: Any) -> int:
    target, reduction = node._saved_target, _REDUCTIONS[node._saved_reduction]
    valid = target != node._saved_ignore_index
    counted = valid.sum()
    num_tokens: int | Tensor = int(counted) if is_host(counted) else counted
    loss_id = _told_once(recorder, node, "nll_loss", reduction, target, num_tokens)
    arrived = functools.partial(
        gradient_arrived,
        recorder,
        loss_id=loss_id,
        num_tokens=num_tokens,
        reduction=reduction,
        is_main=True,
        valid=valid if reduction == "none" else None,
    )
    _hook(recorder, node, arrived)
    return loss_id


def _watch_picks(recorder: Recorder, node: Any, op: str) -> int:
    saved = getattr(node, PICKS[name_of(node)])
    labels = saved if isinstance(saved, Tensor) else saved[-1]
    loss_id = _told_once(recorder, node, op, "none", labels, None, node.metadata.get(PICKED))
    _hook(recorder, node, functools.partial(log_probs.gradient_arrived, recorder, loss_id=loss_id))
    return loss_id


def _watch_labelled(recorder: Recorder, node: Any) -> int:
    given: Labelled = node.metadata[LABELLED]
    known = given.share.isfinite() if isinstance(given.share, Tensor) else None
    loss_id = _told_once(recorder, node, given.op, "none", given.labels, None, given.site, known)

    def arrived(grad: Tensor) -> None:
        weights = torch.where(given.left_out, 0, -given.sign * given.share * grad.detach())
        log_probs.gradient_arrived(recorder, weights, loss_id=loss_id, known=known)

    _hook(recorder, node, arrived, given.output)
    _count_nothing_inside(recorder, node)
    return loss_id


def _count_nothing_inside(recorder: Recorder, node: Any) -> None:
    """What such a function evaluates again in its own backward is its way to a gradient that is counted already."""

    def begins(_: Any) -> None:
        begun.remove()
        if recorder.current is not None:
            recorder.current.inside_losses += 1

    def ends(*_: Any) -> None:
        ended.remove()
        if recorder.current is not None:
            recorder.current.inside_losses -= 1

    begun = node.register_prehook(kept_away(recorder, "unseen", begins))
    ended = node.register_hook(kept_away(recorder, "unseen", ends))


def _watch_soft_targets(recorder: Recorder, node: Any, found: Found) -> None:
    """Where targets sum to 1 over the classes, the gradients that arrive at log-probabilities sum to -weight. Other
    targets make another loss of the same log-probabilities: what uses them tells."""
    dim, users = dim_of(node), found.above.get(node, [])
    user, dtype = users[0] if len(users) == 1 else None, dtype_of(node, 0)
    told = "log_softmax", "none", None, None
    loss_id = _told_once(recorder, user, *told, output=_OF_ITS_INPUT, dtype=dtype, rows=rows_of(node, dim))

    def arrived(grad: Tensor) -> None:
        held = getattr(grad, "_local_tensor", grad).detach()
        weights = log_probs.without_rounding(held.sum(dim, dtype=torch.float64), grad.dtype)
        log_probs.gradient_arrived(recorder, weights, loss_id=loss_id)

    _hook(recorder, node, arrived)


def _hook(recorder: Recorder, node: Any, arrived: Callable[[Tensor], None], index: int = 0) -> None:
    def before(grads: tuple[Tensor | None, ...]) -> None:
        handle.remove()  # a graph that is kept and run again is found again
        gradient = grads[index]
        if gradient is not None:
            arrived(gradient)

    handle = node.register_prehook(kept_away(recorder, "unseen", before))


@guarded("unseen")
def nothing_seen(recorder: Recorder, current: BackwardPass) -> None:
    """A scalar was differentiated and no loss below it was recognised: the root itself is taken down as the loss. The
    part of a pass that a zero-bubble schedule runs first reaches no parameter."""
    for handle in current.handles:
        handle.remove()
    reaches = current.touched or recorder.in_pipeline
    if current.root_loss is None or not reaches or recorder.loss_seen_in == current.seq:
        return
    node, output = current.root_edge
    batch = {} if current.targets is None else {"inputs_hash": current.inputs, "targets_hash": current.targets}
    loss_id = _told_once(recorder, node, current.root_loss, "unknown", None, None, output=output, **batch)
    told = [term.told for term in current.reduced]
    tell_whole(recorder, current, loss_id, **(told[0] if len(told) == 1 else {}))
    if current.whole is not None and current.reduced and all(term.arrived is not None for term in current.reduced):
        whole = number(current.whole)
        for ordinal, (term, fields) in enumerate(zip(current.reduced, told, strict=True)):
            assert term.arrived is not None
            emit_term(recorder, current, term.arrived, term.op, ordinal, whole=whole, **fields)
