"""Losses inside of functions that torch.compile makes one operation of (a model that is given labels, a loss function).

What a compiler gives back is one autograd node that tells nothing. Where Dynamo hands the graph to it
(torch/_dynamo/output_graph.py, call_user_compiler), its losses are read; beside each call the few operations around a
loss run again, on the labels that went in and with a stand-in for the loss itself. The stand-in is recorded, and given
the gradient that arrives at the compiled function's result. What is compiled, and computes, stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.hooks import unserializable_hook

from gradcheck_dist.probes.losses.compiled_graph import CompiledLoss, Way, losses_of
from gradcheck_dist.probes.losses.loss import evaluated
from gradcheck_dist.probes.recording.marks import mark_recorded
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import site_in

_current: Recorder | None = None
"""Who records now: what was compiled in one session is called in the next."""


def install(recorder: Recorder, patches: Patches) -> None:
    global _current
    _current = recorder

    def watch(module: ModuleType) -> None:
        patches.replace(module.OutputGraph, "call_user_compiler", functools.partial(_watch, recorder))

    patches.when_imported("torch._dynamo.output_graph", watch)
    patches.replace(torch, "compile", functools.partial(_unwrapping, patches))
    patches.on_restore(_forget)


def _forget() -> None:
    global _current
    _current = None


def _unwrapping(patches: Patches, original: Callable[..., Any]) -> Callable[..., Any]:
    """Who compiles one of torch's functions by itself (F.cross_entropy) compiles torch's: what replaces it is kept
    from Dynamo."""

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        own = next((old for old, new in patches.replaced_functions() if new is model), model)
        return original(own, **options)

    return compile


def _watch(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call_user_compiler(self: Any, gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        losses = compiling(recorder, self, gm)
        compiled = original(self, gm, *args, **kwargs)
        return functools.partial(_run, compiled, gm, losses) if losses else compiled

    return call_user_compiler


def _run(compiled: Callable[..., Any], graph: GraphModule, losses: list[CompiledLoss], *inputs: Any) -> Any:
    recorder = _current
    if recorder is None:
        return compiled(*inputs)
    # A backend that only runs the graph calls torch's functions, which are replaced.
    before, recorder.in_loss = recorder.in_loss, True
    try:
        results = compiled(*inputs)
    finally:
        recorder.in_loss = before
    called(recorder, graph, losses, inputs, results)
    return results


def compiling(recorder: Recorder, output_graph: Any, graph: GraphModule) -> list[CompiledLoss]:
    """The losses of a graph that is about to be compiled; none where the result will be stored as it is. Guarded by
    hand: what is guarded does not run while something is compiled."""
    try:
        stored = getattr(output_graph, "package", None) is not None or getattr(output_graph, "export", False)
        return [] if stored else losses_of(graph)
    except Exception as error:
        recorder.failed("compiled", error)
        return []


@guarded("compiled")
def called(
    recorder: Recorder, graph: GraphModule, losses: list[CompiledLoss], inputs: tuple[Any, ...], results: Any
) -> None:
    """A compiled function with losses has given its results."""
    if recorder.suspended or not isinstance(results, tuple | list):
        return
    for loss in losses:
        ways = [way for way in loss.ways if results[way.index] is not None and results[way.index].requires_grad]
        if ways:
            recorder.ensure_step()
            if recorder.recording:
                _stand_in(recorder, graph, loss, ways, inputs, results)


def _stand_in(
    recorder: Recorder,
    graph: GraphModule,
    loss: CompiledLoss,
    ways: list[Way],
    inputs: tuple[Any, ...],
    results: Sequence[Tensor],
) -> None:
    """Record a tensor in the place of a loss, from which the graph's results are computed once more."""
    with torch.no_grad():
        values = loss.fed(graph, inputs)
        target = values[loss.target]
        if loss.reduction == "none" and target.is_floating_point():
            return
        shape = target.shape if loss.reduction == "none" else ()
    with torch.enable_grad():
        dtype, device = loss.call.meta["example_value"].dtype, results[ways[0].index].device
        leaf = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        stand_in = leaf.clone()
        behind = [loss.result_of(way, graph, stand_in.clone(), values) for way in ways]
    if any(one.shape != results[way.index].shape for way, one in zip(ways, behind, strict=True)):
        return
    weight = values[loss.weight] if loss.weight is not None else None
    ignored = loss.ignore_index if isinstance(loss.ignore_index, int) else int(values[loss.ignore_index])
    site = site_in(loss.stack_trace)
    evaluated(recorder, stand_in, target, loss.op, ignored, loss.reduction, weight, site=site, is_stand_in=True)
    recorded = recorder.losses.get(stand_in)
    if recorded is None:
        return
    for way, one in zip(ways, behind, strict=True):
        result = results[way.index]
        mark_recorded(result, recorded["loss_id"], output=result.output_nr)
        if one.requires_grad:
            hook = functools.partial(_arrived, recorder, leaf, one, way.num_terms)
            result.register_hook(unserializable_hook(hook))


@guarded("compiled")
def _arrived(recorder: Recorder, leaf: Tensor, behind: Tensor, num_terms: int, grad: Tensor | None) -> None:
    """Hand on the gradient of a compiled function's result to the loss's stand-in, whose own hook records it."""
    if recorder.current is None or grad is None:  # None: another result of the same function was differentiated
        return
    recorder.current.other_losses += num_terms
    recorder.suspended += 1  # no pass of the trainer's
    try:
        torch.autograd.grad(behind, leaf, grad, retain_graph=True)
    finally:
        recorder.suspended -= 1
