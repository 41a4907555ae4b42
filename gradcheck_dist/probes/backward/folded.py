"""Functions that add a parameter's gradient to its `.grad` by themselves and hand that very memory on as the gradient,
having emptied `.grad`: a weight gradient whose sum with the earlier ones is one matrix product (torchtitan#4386).

What arrives at the leaf then holds what earlier passes left, too. A contribution is what the function added. Where
`.grad` was not emptied, autograd adds that memory to itself: torch.cuda.make_graphed_callables hands on the same
buffers in each pass, and a pass that finds no `.grad` keeps them for it (pytorch#181723). What was written there by no
operation of torch's, as by the replay of a graph, is taken to be written over.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gradcheck_dist.probes.parameters.registry import LocalPlan, ParamInfo
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away


class _Held(NamedTuple):
    """The gradient that a parameter had when backward came to a function: where it lay, and some of its elements."""

    info: ParamInfo
    address: int
    version: int
    plan: LocalPlan
    values: Tensor


@guarded("folded")
def watch(recorder: Recorder, args: tuple[Any, ...], results: Any) -> None:
    """A function was applied: see whether it hands on a gradient that was there before. Runs behind every function:
    kept short."""
    for arg in args:
        if isinstance(arg, Parameter) and arg.requires_grad:
            _watch(recorder, args, results)
            return


def _watch(recorder: Recorder, args: tuple[Any, ...], results: Any) -> None:
    watched = recorder.samples_upcoming
    params = [arg for arg in args if isinstance(arg, Parameter) and arg.requires_grad] if watched else []
    infos = [info for param in params if (info := recorder.registry.find(param)) is not None]
    made = results[0] if isinstance(results, tuple) and results else results
    node: Any = getattr(made, "grad_fn", None)
    if not infos or node is None:
        return
    held: list[_Held] = []
    node.register_prehook(kept_away(recorder, "folded", functools.partial(_reached, recorder, infos, held)))
    node.register_hook(kept_away(recorder, "folded", functools.partial(_left, recorder, held)))


def _reached(recorder: Recorder, infos: list[ParamInfo], held: list[_Held], _grads: tuple[Tensor | None, ...]) -> None:
    held.clear()
    if recorder.current is None or not recorder.sampling:
        return
    for info in infos:
        grad = info.param.grad
        if info.active and type(grad) is Tensor and grad.layout is torch.strided:
            found = recorder.registry.plan(info, grad)
            if found is not None:
                values = grad.detach().take(found[0].indices)
                held.append(_Held(info, grad.data_ptr(), grad._version, found[0], values))


def _left(recorder: Recorder, held: list[_Held], given: tuple[Tensor | None, ...], _: tuple[Any, ...]) -> None:
    current, was_held = recorder.current, held.copy()
    held.clear()
    if current is None or not was_held:
        return
    addresses = set(map(_address, given))
    for before in was_held:
        if before.address not in addresses:
            continue
        grad = before.info.param.grad
        if grad is not None and _address(grad) == before.address:
            current.onto_itself[before.info.id] = before.info
            if grad._version == before.version:  # a graph that was replayed wrote over it
                continue
        current.folded[before.info.id] = before.plan, before.values


def _address(grad: Tensor | None) -> int | None:
    return grad.data_ptr() if type(grad) is Tensor and grad.layout is torch.strided and grad.numel() else None
