"""The trainer's own lines that change gradients where they lie (`p.grad /= n`, `p.grad.copy_(x)`, `p.grad[0] = 0`), or
put a multiple of one in its place (`p.grad = p.grad / n`).

What they do to a gradient is measured like everything that happens between two samples; this probe tells their lines.
A buffer in which gradients lie is known by address, one in which they were reduced by value, and its line is theirs.
Other tensors that are multiplied by a number in between may be buffers of gradients, and are noted as nobody's. What a
gradient was multiplied into may become one (`multiples.py`).

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
from torch.overrides import handle_torch_function, has_torch_function_unary, has_torch_function_variadic

from gradcheck_dist.events import SCALED, WRITTEN, GradWrite, Site
from gradcheck_dist.probes.optimizers.multiples import Multiple, Multiples
from gradcheck_dist.probes.parameters.places import address_of
from gradcheck_dist.probes.parameters.regions import in_memory
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

MUL, DIV, COPY = "mul", "div", "copy"
METHODS = {
    "mul_": MUL, "multiply_": MUL, "__imul__": MUL,
    "div_": DIV, "divide_": DIV, "true_divide_": DIV, "__itruediv__": DIV,
    "copy_": COPY, "__setitem__": WRITTEN, "clamp_": WRITTEN, "masked_fill_": WRITTEN,
    "add_": WRITTEN, "__iadd__": WRITTEN, "sub_": WRITTEN, "__isub__": WRITTEN,
}  # fmt: skip
MOST_OTHERS = 64
"""Calls in a step, on tensors that are nobody's gradient, of which the lines are kept."""
NEW_METHODS = {
    "mul": MUL, "multiply": MUL, "__mul__": MUL, "__rmul__": MUL,
    "div": DIV, "divide": DIV, "true_divide": DIV, "__truediv__": DIV,
}  # fmt: skip
"""Those that leave a tensor as it is, and give another one."""
FOREACH = {
    "_foreach_mul_": MUL, "_foreach_div_": DIV, "_foreach_add_": WRITTEN, "_foreach_copy_": WRITTEN,
}  # fmt: skip


def install(recorder: Recorder, patches: Patches) -> None:
    recorder.writes = writes = Writes(recorder)
    for name, op in METHODS.items():
        patches.replace(torch.Tensor, name, functools.partial(_watch, recorder, writes, op))
    for name, op in NEW_METHODS.items():
        patches.replace(torch.Tensor, name, functools.partial(_watch_new, recorder, writes, op))
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


def _watch_new(recorder: Recorder, writes: Writes, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
    of_torch = inspect.unwrap(original)

    @functools.wraps(original)
    def multiple(self: Tensor, other: Any, **kwargs: Any) -> Any:
        if has_torch_function_variadic(self, other):
            made = handle_torch_function(of_torch, (self, other), self, other, **kwargs)
        else:
            made = original(self, other, **kwargs)
        if recorder.between_passes and not (kwargs or self.requires_grad or torch.compiler.is_compiling()):
            made_of(recorder, writes, op, self, other, made)
        return made

    return multiple


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
    scales = op in (MUL, DIV)
    number = _Number.of(other, op) if scales else None
    if len(tensors) == 1 and (of := writes.multiples.product(tensors[0])) is not None:
        writes.note_product(of.info, tensors[0], of, caller_site(), number)
        return
    infos, done = writes.whose(tensors, often=scales), SCALED if scales else WRITTEN
    if not infos and (parts := writes.whose([one._base for one in tensors if isinstance(one, Tensor)], often=False)):
        infos, done = parts, WRITTEN
    if not infos and number is not None:
        infos = writes.in_buffers(tensors)
    if op == COPY and (of := writes.multiples.product(other)) is not None and infos == [of.info]:
        writes.multiples.taken(of)  # `p.grad.copy_(p.grad / n)`
        return
    if infos or (number is not None and number.factor != 1 and _may_be_gradients(tensors)):
        writes.note(infos, caller_site(), number, done)


@guarded("writes")
def made_of(recorder: Recorder, writes: Writes, op: str, tensor: Tensor, other: Any, made: Any) -> None:
    """`made` is one tensor times another one, or a number, or through it."""
    if recorder.suspended or not isinstance(made, Tensor):
        return
    if op == MUL and isinstance(other, Tensor) and other.numel() > tensor.numel() == 1:
        tensor, other = other, tensor
    of = writes.multiples.product(tensor)
    infos = [of.info] if of is not None else writes.whose([tensor], often=False)
    if infos and made.shape == tensor.shape and address_of(made):
        writes.note_product(infos[0], made, of, caller_site(), _Number.of(other, op))


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
        """None where it is no one number here (a DTensor's share of one is none), or zero, or one that divides zero."""
        if not all(one.is_replicate() for one in getattr(other, "placements", ())):
            return None
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


class Line:
    """What a line did to some gradients, in one go."""

    def __init__(self, seq: int, site: Site | None, number: _Number | None, op: str, infos: list[ParamInfo]) -> None:
        self.seq, self.t_ns, self.site, self.number, self.op = seq, time.time_ns(), site, number, op
        self.infos = {info.id: info for info in infos}
        self.is_nobodys = not infos

    def goes_on(self, other: Line) -> bool:
        """Whether the next call of the same line does the same to others."""
        if (self.site, self.op, self.is_nobodys) != (other.site, other.op, other.is_nobodys):
            return False
        if not self.infos.keys().isdisjoint(other.infos):
            return False  # once more to the same ones
        if self.number is not None and other.number is not None and self.number.joins(other.number):
            return True
        return self.number == other.number


class Writes:
    """Lines that wrote to gradients in this step, told when it ends: one event for neighbouring calls of one line."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_others = 0
        self._waiting: list[Line] = []
        self.multiples = Multiples(functools.partial(recorder.places.whose, often=False))

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

    def note(self, infos: list[ParamInfo], site: Site | None, number: _Number | None, op: str) -> Line | None:
        """Keep what a line did; None where it did so to one tensor too many that is nobody's gradient."""
        recorder = self._recorder
        line = Line(recorder.last_seq, site, number, op, infos)
        if self._waiting and self._waiting[-1].seq == line.seq and self._waiting[-1].goes_on(line):
            self._waiting[-1].infos |= line.infos
            return self._waiting[-1]
        if not infos:
            self._num_others += 1
            if self._num_others > MOST_OTHERS:
                return None
        if number is not None:
            number.keep()
        line.seq = recorder.next_seq()
        self._waiting.append(line)
        return line

    def note_product(
        self, info: ParamInfo, made: Tensor, of: Multiple | None, site: Site | None, number: _Number | None
    ) -> None:
        """What is `made` of a gradient, or of a product of its own, may come into its place."""
        if of is None:
            self.multiples.confirm_for(info)
        line = self.note([info], site, number, SCALED)
        if line is not None:
            self.multiples.add(Multiple.of_made(info, made, of, line.infos), made)

    def tell(self) -> None:
        """Emit what was seen."""
        self.multiples.end()
        waiting, self._waiting, self._num_others = self._waiting, [], 0
        for line in _joined(waiting):
            params = self._recorder.registry.param_set(list(line.infos.values())) if line.infos else None
            factor = line.number.told if line.number is not None else None
            self._recorder.emit(
                _write, seq=line.seq, t_ns=line.t_ns, site=line.site, params=params, factor=factor, op=line.op
            )


def _joined(lines: list[Line]) -> list[Line]:
    """Without those of which nothing came, which may have stood between two calls of one."""
    kept: list[Line] = []
    next_seq = 0
    for line in lines:
        goes_on = line.seq == next_seq
        next_seq = line.seq + 1 if goes_on or line.infos or line.is_nobodys else 0
        if not (line.infos or line.is_nobodys):
            continue
        if goes_on and kept and kept[-1].goes_on(line):
            kept[-1].infos |= line.infos
        else:
            kept.append(line)
    return kept


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
