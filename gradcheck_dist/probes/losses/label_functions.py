"""Losses that a torch.autograd.Function of somebody's computes, one for each label.

Megatron's vocabulary-parallel cross-entropy, fused linear cross-entropies and TRL's chunked log-probabilities leave one
node in the autograd graph, of which nothing tells what it counts. What went in does: whole-number labels, as many as
come out. The node is marked in forward, and counts where `unseen.py` finds it between the root and the model. The
gradient that arrives at one of its results is the weight of that token's loss, or minus that for a log-probability.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from gradcheck_dist.events import Site
from gradcheck_dist.probes.activations.exchanges import watch
from gradcheck_dist.probes.losses.attached_terms import scalars_of, watch_attached
from gradcheck_dist.probes.recording.marks import LABELLED
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

WHOLE = (torch.int64, torch.int32)


class Labelled(NamedTuple):
    """`output`: which output holds a number for each label; `left_out` is true at labels without a loss; `sign` is 1
    where the numbers are losses, -1 where they are log-probabilities, as a tensor on their device."""

    op: str
    output: int
    labels: Tensor
    left_out: Tensor
    sign: Tensor
    site: Site | None


def install(recorder: Recorder, patches: Patches) -> None:
    original = inspect.getattr_static(Function, "apply").__func__

    @functools.wraps(original)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.suspended or torch.compiler.is_compiling():
            return original(cls, *args, **kwargs)
        watched = recorder.exchanges
        if watched is None:
            results = original(cls, *args, **kwargs)
        else:
            calls = watched.enter()
            try:
                results = original(cls, *args, **kwargs)
            finally:
                watched.leave()
            watch(recorder, watched, cls, args, results, calls)
        applied(recorder, cls, args, results)
        return results

    bound = classmethod(apply)
    found = inspect.getattr_static(Function, "apply")
    Function.apply = bound  # type: ignore[assignment, method-assign]

    def restore() -> None:
        if inspect.getattr_static(Function, "apply") is bound:
            Function.apply = found  # type: ignore[method-assign]

    patches.on_restore(restore)


@guarded("label_functions")
def applied(recorder: Recorder, cls: type[Function], args: tuple[Any, ...], results: Any) -> None:
    """Mark the node of a function that gave one number for each label, and watch for losses that it attaches. Runs
    behind every function: kept short."""
    if scalars := scalars_of(args, results):
        watch_attached(cls.__name__, recorder, scalars)
    whole = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype in WHOLE and arg.dim()]
    if not whole:
        return
    for index, output in enumerate(results if isinstance(results, tuple) else (results,)):
        if not (isinstance(output, Tensor) and output.is_floating_point() and output.grad_fn is not None):
            continue
        labels = next((arg for arg in whole if arg.shape == output.shape), None)
        if labels is None or not _have_classes(args, labels):
            continue
        losses = output.detach()
        given = [arg for arg in args if type(arg) is int]
        left_out = labels < 0
        if given:  # one of these may be the label to ignore, which has no loss then
            left_out = left_out | (torch.isin(labels, torch.tensor(given, device=labels.device)) & (losses == 0))
        sign = torch.where((losses > 0).any(), 1.0, -1.0)
        site = caller_site()
        node: Any = output.grad_fn
        node.metadata[LABELLED] = Labelled(cls.__name__, index, labels, left_out, sign, site)
        return


def _have_classes(args: tuple[Any, ...], labels: Tensor) -> bool:
    """Whether there is a tensor with a gradient that has a row, of logits or features, for each label."""
    count = labels.numel()
    return any(
        isinstance(arg, Tensor) and arg.requires_grad and arg.dim() > 1 and arg.numel() // arg.shape[-1] == count
        for arg in args
        if isinstance(arg, Tensor) and arg.numel()
    )
