"""Losses that a torch.autograd.Function of somebody's computes, one for each label.

Megatron's vocabulary-parallel cross-entropy, fused linear cross-entropies and TRL's chunked log-probabilities leave one
node in the autograd graph, of which nothing tells what it counts. What went in does: whole-number labels, as many as
come out. The node is marked in forward, and counts where `unseen.py` finds it between the root and the model. The
gradient that arrives at one of its results is the weight of that token's loss, or minus that for a log-probability.
One result for all labels counts them where its value is the sum of their cross-entropies, or that over a number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from gradcheck_dist.events import Site
from gradcheck_dist.function_apply import application
from gradcheck_dist.probes.activations import activation_hooks
from gradcheck_dist.probes.activations.exchange_calls import Calls
from gradcheck_dist.probes.activations.exchanges import watch
from gradcheck_dist.probes.backward import folded, fused
from gradcheck_dist.probes.losses import by_gradient
from gradcheck_dist.probes.losses.attached_terms import scalars_of, watch_attached
from gradcheck_dist.probes.losses.closed_form import (
    CASES,
    Looked,
    divisors,
    given_to,
    is_one_of,
    look,
    number_before,
    sum_of,
    valid_in,
)
from gradcheck_dist.probes.losses.loss_backward import Functions
from gradcheck_dist.probes.losses.loss_backward import watch as watch_backward
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain
from gradcheck_dist.probes.recording.marks import LABELLED
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

WHOLE = (torch.int64, torch.int32)
_GENERATED = "GeneratedBackwardFor_"
"""What torch puts before the name of an operator that was registered by torch.library (torch/_library/autograd.py)."""


class Labelled(NamedTuple):
    """`output`: which output holds a number for each label, or the sum of these times `share`; `left_out` is true at
    labels without a loss; `sign` is 1 where the numbers are losses, -1 where they are log-probabilities, as a tensor on
    their device. A `share` that lies on an accelerator may be no number: then the output is no such sum."""

    op: str
    output: int
    labels: Tensor
    left_out: Tensor
    sign: Tensor
    site: Site | None
    share: float | Tensor = 1.0


def install(recorder: Recorder, patches: Patches) -> None:
    found = Function.__dict__["apply"]
    original = application(found)
    functions = Functions(recorder)

    @functools.wraps(original)
    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if recorder.suspended or torch.compiler.is_compiling():
            return original(cls, *args, **kwargs)
        whole = [arg for arg in args if isinstance(arg, Tensor) and arg.dtype in WHOLE and arg.dim()]
        looked = look_at(recorder, args, whole) if whole else None
        if not recorder.records_upcoming:
            return original(cls, *args, **kwargs)
        watched = recorder.exchanges
        calls = Calls()
        if watched is None:
            results = original(cls, *args, **kwargs)
        else:
            calls = watched.enter()
            try:
                results = original(cls, *args, **kwargs)
            finally:
                watched.leave()
            watch(recorder, watched, cls, args, results, calls)
        applied(recorder, cls, args, results, whole, functions, looked, calls)
        activation_hooks.applied(recorder, cls, args, results, calls)
        fused.watch(recorder, args, results)
        folded.watch(recorder, args, results)
        return results

    bound = classmethod(apply)
    Function.apply = bound  # type: ignore[assignment, method-assign]

    def restore() -> None:
        if Function.__dict__["apply"] is bound:
            Function.apply = found  # type: ignore[method-assign]

    patches.on_restore(restore)


@guarded("label_functions")
def look_at(recorder: Recorder, args: tuple[Any, ...], whole: list[Tensor]) -> Looked | None:
    """Some labels and logits that a function is about to be applied to; None where there are none."""
    given = given_to(args, whole) if torch.is_grad_enabled() else None
    if given is None:
        return None
    recorder.ensure_step()
    if recorder.recording:
        for param in (given.weight, given.bias):  # of an output layer that is not called itself
            known = not isinstance(param, Parameter) or recorder.registry.find(param) is not None
            if param is not None and param.requires_grad and not known:
                recorder.discovery.hook(recorder.registry.add_unnamed(param), param)
    with torch.no_grad():
        return look(given) if recorder.sampling else None


@guarded("label_functions")
def applied(
    recorder: Recorder,
    cls: type[Function],
    args: tuple[Any, ...],
    results: Any,
    whole: list[Tensor],
    functions: Functions,
    looked: Looked | None,
    calls: Calls,
) -> None:
    """Mark the node of a function that gave one number for each label, or their sum, and watch for losses that it
    attaches. Runs behind every function: kept short."""
    if scalars := scalars_of(args, results):
        watch_attached(cls.__name__, recorder, scalars)
    if not whole:
        return
    for index, output in enumerate(results if isinstance(results, tuple) else (results,)):
        if not (isinstance(output, Tensor) and output.is_floating_point() and output.grad_fn is not None):
            continue
        share: float | Tensor | None = None
        number: float | Tensor = 1.0
        labels = next((arg for arg in whole if arg.shape == output.shape), None)
        if labels is not None and _have_classes(args, labels):
            left_out = labels < 0
            # One of the whole numbers may be the label to ignore, or a mask be given: it has no loss.
            left_out = left_out | ((is_one_of(labels, args) | _is_masked(labels, args)) & (output.detach() == 0))
            number = _number(functions, cls, looked, labels, output, not calls)
        elif output.numel() == 1:
            summed = None if calls else _sum(recorder, functions, cls, args, whole, looked, output.detach())
            if summed is None:
                if looked is not None and looked.given.weight is None:
                    by_gradient.watch(recorder, cls, looked.given, output)
                elif looked is not None and not calls:
                    by_gradient.watch_fused(recorder, cls, looked, output, args)
                continue
            labels, share, valid = summed
            left_out = ~valid.view(labels.shape)
        else:
            continue
        sign = torch.where((output.detach() > 0).any(), 1.0, -1.0)
        node: Any = output.grad_fn
        node.metadata[LABELLED] = Labelled(
            _name(cls), index, labels, left_out, sign, caller_site(), number if share is None else share
        )
        is_whole = isinstance(number, float) and number != 1.0  # what is over shards is no multiple of one shard's
        groups = {call.ranks for call in calls if not is_whole}
        if looked is not None and looked.given.labels is labels and len(groups) <= 1 and functions.admit(cls):
            of_ranks, head = groups.pop() if groups else (), functions.asks_for_weight(cls)
            watch_backward(recorder, cls, looked, output, share=share, number=number, group=of_ranks, head=head)
        return


def _is_masked(labels: Tensor, args: Sequence[Any]) -> Tensor:
    """Where one of the other tensors that hold a number for each label, a weight or a mask, is zero."""
    found = torch.zeros_like(labels, dtype=torch.bool)
    for arg in args:
        if not isinstance(arg, Tensor) or arg.dtype in WHOLE or arg.requires_grad or not is_plain(arg):
            continue
        if arg.numel() == labels.numel() and arg.device == labels.device:
            found |= arg.detach().reshape(labels.shape) == 0
    return found


def _number(
    functions: Functions, cls: type[Function], looked: Looked | None, labels: Tensor, output: Tensor, whole: bool
) -> float | Tensor:
    """What stands before each label's loss inside of a function (one over a count). In a step without samples it is
    not known where it was another than 1 before."""
    if looked is None or looked.given.labels is not labels or output.device != looked.logits.device:
        return output.new_full((), torch.nan) if cls in functions.scaled else 1.0
    with torch.no_grad():
        found = number_before(looked, output, whole=whole)
    functions.multiplies(cls, found)
    return found if not is_host(found) or found.isnan() else float(found)


def _sum(
    recorder: Recorder,
    functions: Functions,
    cls: type[Function],
    args: tuple[Any, ...],
    whole: list[Tensor],
    looked: Looked | None,
    output: Tensor,
) -> tuple[Tensor, float | Tensor, Tensor] | None:
    """The labels of a function's one result, what the sum of their losses is multiplied by, and which of them count;
    None where it is no such sum. What lies on an accelerator is told by a share that is no number, until the answer has
    come. In a step without samples the result is what it was before."""
    with torch.no_grad():
        known = functions.sums.get(cls)
        if not recorder.sampling:
            ignores, over = CASES[known] if known is not None and known >= 0 else (False, "number")
            given = given_to(args, whole) if over != "number" else None
            if given is None:
                return None
            valid = valid_in(given, args, ignores=ignores)
            number = dict(divisors((), valid))[over]
            divisor = number.clamp_min(1).double() if isinstance(number, Tensor) else number
            return given.labels, _read(1 / divisor), valid
        no_sum = known is not None and known < 0 and not is_host(output)  # else each result is looked at
        found = sum_of(looked, output, args) if looked is not None and not no_sum else None
        if looked is None or found is None:
            return None
        functions.found(cls, found.case)
        share = _read(found.share)
        no_number = isinstance(share, float) and math.isnan(share)
        return None if no_number else (looked.given.labels, share, found.valid)


def _read(share: float | Tensor) -> float | Tensor:
    return share.item() if isinstance(share, Tensor) and is_host(share) else share


def _name(cls: type[Function]) -> str:
    """What somebody called it: torch_nn__linear_cross_entropy_batch_chunked is a fused loss of torch."""
    generated = cls.__name__.startswith(_GENERATED)
    return cls.__name__.removeprefix(_GENERATED).removesuffix("_default") if generated else cls.__name__


def _have_classes(args: tuple[Any, ...], labels: Tensor) -> bool:
    """Whether there is a tensor with a gradient that has a row, of logits or features, for each label."""
    count = labels.numel()
    return any(
        isinstance(arg, Tensor) and arg.requires_grad and arg.dim() > 1 and arg.numel() // arg.shape[-1] == count
        for arg in args
        if isinstance(arg, Tensor) and arg.numel()
    )
