"""Functions that add a parameter's gradient to its `.grad` by themselves and hand that very memory on as the gradient,
having emptied `.grad`: a weight gradient whose sum with the earlier ones is one matrix product (torchtitan#4386).

What arrives at the leaf then holds what earlier passes left, too. A contribution is what the function added.
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

    address: int
    plan: LocalPlan
    values: Tensor


@guarded("folded")
def watch(recorder: Recorder, args: tuple[Any, ...], results: Any) -> None:
    """A function was applied: see whether it hands on a gradient that was there before. Runs behind every function:
    kept short."""
    for arg in args:
        if isinstance(arg, Parameter) and arg.requires_grad:
            _watch(recorder, arg, results)


def _watch(recorder: Recorder, param: Parameter, results: Any) -> None:
    info = recorder.registry.find(param) if recorder.sampling else None
    made = results[0] if isinstance(results, tuple) and results else results
    node: Any = getattr(made, "grad_fn", None)
    if info is None or node is None:
        return
    held: list[_Held] = []
    node.register_prehook(kept_away(recorder, "folded", functools.partial(_reached, recorder, info, held)))
    node.register_hook(kept_away(recorder, "folded", functools.partial(_left, recorder, info, held)))


def _reached(recorder: Recorder, info: ParamInfo, held: list[_Held], _grads: tuple[Tensor | None, ...]) -> None:
    held.clear()
    grad = info.param.grad
    if recorder.current is None or not (recorder.sampling and info.active) or type(grad) is not Tensor:
        return
    found = recorder.registry.plan(info, grad) if grad.layout is torch.strided else None
    if found is not None:
        held.append(_Held(grad.data_ptr(), found[0], grad.detach().take(found[0].indices)))


def _left(
    recorder: Recorder, info: ParamInfo, held: list[_Held], given: tuple[Tensor | None, ...], _: tuple[Any, ...]
) -> None:
    current = recorder.current
    for before in held:
        if current is not None and any(_begins_at(one, before.address) for one in given):
            current.folded[info.id] = before.plan, before.values
    held.clear()


def _begins_at(grad: Tensor | None, address: int) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided and grad.data_ptr() == address
