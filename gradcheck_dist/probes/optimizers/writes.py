"""The trainer's own lines that change gradients where they lie: `p.grad /= n`, `p.grad.copy_(x)`, `p.grad[0] = 0`.

What they do to a gradient is measured like everything that happens between two samples; this probe tells their lines.
A buffer in which gradients lie is known by address, one in which they were reduced by value, and its line is theirs.
Other tensors that are multiplied by a number in between may be buffers of gradients, and are noted as nobody's. A
gradient that is replaced (`p.grad = p.grad / n`) is not seen, nor one that is added to: optimizers add to each of their
own tensors, which would wait for it.

Methods are replaced on torch.Tensor, so `self` may be any tensor of the process: one attribute is asked, and between
backward passes and the optimizer one address. A class with a `__torch_function__` of its own is given torch's method,
not ours (torch.overrides.handle_torch_function).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from gradcheck_dist.events import SCALED, WRITTEN, GradWrite, Site
from gradcheck_dist.probes.parameters.regions import in_memory
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

MUL, DIV = "mul", "div"
METHODS = {
    "mul_": MUL, "multiply_": MUL, "__imul__": MUL,
    "div_": DIV, "divide_": DIV, "true_divide_": DIV, "__itruediv__": DIV,
    "copy_": WRITTEN, "__setitem__": WRITTEN, "clamp_": WRITTEN, "masked_fill_": WRITTEN,
}  # fmt: skip
MOST_OTHERS = 64
"""Calls in a step, on tensors that are nobody's gradient, of which the lines are kept."""
FOREACH = {
    "_foreach_mul_": MUL, "_foreach_div_": DIV, "_foreach_add_": WRITTEN, "_foreach_copy_": WRITTEN,
}  # fmt: skip


def install(recorder: Recorder, patches: Patches) -> None:
    recorder.writes = writes = Writes(recorder)
    for name, op in METHODS.items():
        patches.replace(torch.Tensor, name, functools.partial(_watch, recorder, writes, op))
    for name, op in FOREACH.items():
        patches.replace(torch, name, functools.partial(_watch_many, recorder, writes, op))


def _watch(recorder: Recorder, writes: Writes, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
    of_torch = inspect.unwrap(original)

    @functools.wraps(original)
    def change(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if recorder.between_passes and not torch.compiler.is_compiling():
            seen(recorder, writes, op, [self], args[0] if args else kwargs.get("other"))
        if has_torch_function_unary(self):
            return handle_torch_function(of_torch, (self,), self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return change


def _watch_many(recorder: Recorder, writes: Writes, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.between_passes and not torch.compiler.is_compiling():
            seen(recorder, writes, op, self, args[0] if args else next(iter(kwargs.values()), None))
        return original(self, *args, **kwargs)

    return change


@guarded("writes")
def seen(recorder: Recorder, writes: Writes, op: str, tensors: Sequence[Tensor], other: Any) -> None:
    if recorder.suspended:
        return
    scales = op != WRITTEN
    number = _Number.of(other, op) if scales else None
    infos, done = writes.whose(tensors, often=scales), SCALED if scales else WRITTEN
    if not infos and (parts := writes.whose([one._base for one in tensors if isinstance(one, Tensor)], often=False)):
        infos, done = parts, WRITTEN
    if not infos and number is not None:
        infos = writes.in_buffers(tensors)
    if infos or (number is not None and number.factor != 1 and _may_be_gradients(tensors)):
        writes.note(infos, caller_site(), number, done)


def _may_be_gradients(tensors: Sequence[Any]) -> bool:
    return any(
        isinstance(one, Tensor) and one.is_floating_point() and not one.requires_grad and one.dim() for one in tensors
    )


class _Number:
    """What all elements are multiplied by: `factor`, None where an accelerator has it. Equal to another if both are the
    same number, or the same tensor with the same content."""

    def __init__(self, factor: float | None, tensor: Tensor | None = None, op: str = MUL) -> None:
        self.factor, self._tensor, self._op = factor, tensor, op
        self._key = factor if tensor is None else (id(tensor), tensor._version, op)
        self._kept: Tensor | None = None

    @classmethod
    def of(cls, other: Any, op: str) -> _Number | None:
        """None where it is no one number, or zero, or one by which zero is divided."""
        if isinstance(other, Tensor) and not is_host(other):
            plain = type(other) is Tensor and other.numel() == 1 and not other.is_complex()
            return cls(None, other, op) if plain else None
        value = _number(other)
        return cls(value if op == MUL else 1 / value) if value else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Number) and self._key == other._key

    __hash__ = None  # type: ignore[assignment]

    def keep(self) -> None:
        """Take a tensor's number as it is now."""
        if self._tensor is not None:
            value = self._tensor.detach().reshape(()).double()
            self._kept = value.clone() if self._op == MUL else 1 / value

    def joins(self, other: _Number) -> bool:
        """Whether it stands for the next tensor as well: no number, where they turn out to differ."""
        if self._kept is None or other._tensor is None or self == other:
            return False
        other.keep()
        assert other._kept is not None
        self._kept = torch.where(self._kept == other._kept, self._kept, torch.nan)
        return True

    @property
    def told(self) -> float | Tensor | None:
        """As a field of an event."""
        return self.factor if self._kept is None else self._kept


class Writes:
    """Lines that wrote to gradients in this step, told when it ends: one event for neighbouring calls of one line."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_others = 0
        self._waiting: list[tuple[int, int, Site | None, tuple[_Number | None, str], list[ParamInfo]]] = []

    def whose(self, tensors: Sequence[Any], often: bool = True) -> list[ParamInfo]:
        """Whose `.grad` these tensors are, or lie where one lies (`.grad.data`, a view of all of it). `often`: as
        parameters are asked again and again for what may be a gradient by now."""
        places = self._recorder.places
        asked = (tensor for tensor in tensors if isinstance(tensor, Tensor) and not tensor.requires_grad)
        if not often:
            asked = (tensor for tensor in asked if tensor.is_floating_point())
        return [info for tensor in asked if (info := places.whose(tensor, often)) is not None]

    def in_buffers(self, tensors: Sequence[Any]) -> list[ParamInfo]:
        """Whose gradients lie in these buffers, or come from them: they hold what a reduction of a flat copy gave."""
        places, found = self._recorder.places, dict[int, ParamInfo]()
        for tensor in tensors:
            if type(tensor) is not Tensor or tensor.dim() != 1 or not tensor.is_floating_point():
                continue
            if tensor.requires_grad or not tensor.is_contiguous():
                continue
            inside = in_memory(tensor, places.overlapping(tensor))
            infos = [one.info for one in inside if one.length == one.info.numel]
            infos = infos or places.by_value.reduced(tensor)
            found.update((info.id, info) for info in infos)
        return list(found.values())

    def note(self, infos: list[ParamInfo], site: Site | None, number: _Number | None, op: str) -> None:
        recorder = self._recorder
        if self._waiting:
            seq, _, last_site, (last_number, last_op), last = self._waiting[-1]
            if (last_site, last_op, seq, bool(last)) == (site, op, recorder.last_seq, bool(infos)):
                joined = last_number is not None and number is not None and last_number.joins(number)
                if joined or last_number == number:
                    last += infos
                    return
        if not infos:
            self._num_others += 1
            if self._num_others > MOST_OTHERS:
                return
        if number is not None:
            number.keep()
        self._waiting.append((recorder.next_seq(), time.time_ns(), site, (number, op), infos))

    def tell(self) -> None:
        """Emit what was seen."""
        waiting, self._waiting, self._num_others = self._waiting, [], 0
        for seq, t_ns, site, (number, op), infos in waiting:
            params = self._recorder.registry.param_set(list(dict.fromkeys(infos))) if infos else None
            factor = number.told if number is not None else None
            self._recorder.emit(_write, seq=seq, t_ns=t_ns, site=site, params=params, factor=factor, op=op)


def _write(*, factor: float | None, **fields: Any) -> GradWrite:
    told = factor is not None and math.isfinite(factor) and factor != 0  # of a tensor that was read later
    return GradWrite(factor=factor if told else None, **fields)


def _number(value: Any) -> float | None:
    """What all elements are multiplied or divided by; None where it is no one number."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if abs(found) < sys.float_info.max else None
