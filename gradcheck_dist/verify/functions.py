"""The torch.autograd.Functions inside of a module call: which of them gives what is not the derivative, and where.

Every application in a forward is kept and differentiated alone, on what went in and what arrived. One that is wrong is
then taken at its word: in its place stands what its forward gave plus the linear map whose transpose its backward is
(the gradient of its backward in what arrives, torch's "double backward trick"). If that makes the module right, this
function is the only difference. Functions that communicate are left out.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gradcheck_dist.events import Site
from gradcheck_dist.function_apply import application, as_function
from gradcheck_dist.verify.difference import BESIDE, Derivative, differentiate, judge, steps
from gradcheck_dist.verify.inner import inner, random_direction
from gradcheck_dist.verify.observe import Observer
from gradcheck_dist.verify.pieces import is_distributed
from gradcheck_dist.verify.place import model_site
from gradcheck_dist.verify.preserve import RandomState, random_state, set_random_state
from gradcheck_dist.verify.result import FunctionAt, Shape

MAX_APPLIED = 64
"""More functions in one module call are not looked at one by one."""


@dataclass(frozen=True)
class Off:
    """How a gradient is off: `shape` and `factor` as a Result's."""

    shape: Shape
    factor: float | None


@dataclass
class Applied:
    """One application: what went in and came out (one tensor), `arrived` at its output. `wrong`: inputs by position
    whose gradient is not the derivative, and how."""

    cls: type[Function]
    args: tuple[Any, ...]
    random: RandomState
    called_at: Site | None
    output: Tensor
    arrived: Tensor | None = None
    wrong: dict[int, Off] | None = None

    def named(self) -> FunctionAt:
        """What is told of it."""
        off = next(iter((self.wrong or {}).values()), Off("other", None))
        if len({one.shape for one in (self.wrong or {}).values()}) > 1:
            off = Off("other", None)
        elif off.factor is not None and off.factor < 0 and self.hands_on:
            off = Off("reversed", off.factor)
        return FunctionAt(self.cls.__name__, self._defined_at, self.called_at, self.hands_on, off.shape, off.factor)

    @property
    def _defined_at(self) -> Site | None:
        """Where its backward is written."""
        code = getattr(inspect.unwrap(self.cls.backward), "__code__", None)
        return Site(code.co_filename, code.co_firstlineno, code.co_qualname) if code is not None else None

    @property
    def hands_on(self) -> bool:
        """Whether forward gives the input that is wrong as it is."""
        given = [self.args[index] for index in self.wrong or ()]
        return len(given) == 1 and given[0].shape == self.output.shape and torch.equal(given[0], self.output)

    @property
    def variable(self) -> list[int]:
        return [
            index
            for index, arg in enumerate(self.args)
            if isinstance(arg, Tensor) and arg.requires_grad and arg.is_floating_point()
        ]

    def run(self, values: dict[int, Tensor]) -> Tensor:
        """Apply it to other values."""
        args = [values.get(index, arg) for index, arg in enumerate(self.args)]
        set_random_state(self.random)
        with torch.enable_grad():
            result = self.cls.apply(*args)
        if not isinstance(result, Tensor):
            raise TypeError("gives more than one tensor")
        return result

    def backward(self, arriving: Tensor, *, again: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """What backward gives for its inputs; `again`: differentiable in `arriving`."""
        leaves = {index: self.args[index].detach().requires_grad_() for index in self.variable}
        output = self.run({index: leaf.clone() for index, leaf in leaves.items()})
        found = torch.autograd.grad(
            output, list(leaves.values()), arriving, create_graph=again, retain_graph=again, allow_unused=True
        )
        return output, list(found)


class Functions:
    """`recording()` once around a forward, `arrive` behind its backward; then `held()` around every evaluation."""

    def __init__(self) -> None:
        self.applied: list[Applied] = []
        self._next = -1
        self._maps: dict[int, list[Callable[[Tensor], Tensor] | None]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with _replaced(self._kept):
            yield

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._next = 0
        with _replaced(self._at_its_word):
            yield

    @property
    def wrong(self) -> list[Applied]:
        """Those whose backward, alone, does not give the derivative of their forward."""
        return [one for one in self.applied if one.wrong]

    def judge(self) -> None:
        """Differentiate each of them alone."""
        state = random_state()
        try:
            for one in self.applied:
                with contextlib.suppress(Exception):  # the user's function may raise anything
                    one.wrong = _wrong_inputs(one)
        finally:
            set_random_state(state)

    def _kept(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        state, observer = random_state(), Observer()
        given = tuple(map(_copy, args))
        with observer:
            result = apply(*args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        plain = isinstance(result, Tensor) and not any(map(is_distributed, (result, *tensors)))
        if plain and result.requires_grad and not observer.ranks and len(self.applied) <= MAX_APPLIED:
            one = Applied(cls, given, state, model_site(), result.detach().clone())
            result.register_hook(lambda grad: setattr(one, "arrived", grad.detach().clone()))
            self.applied.append(one)
        return result

    def _at_its_word(self, cls: type, args: tuple[Any, ...], apply: Callable[..., Any]) -> Any:
        if self._next >= len(self.applied) or self.applied[self._next].cls is not cls:
            return apply(*args)
        index, one = self._next, self.applied[self._next]
        self._next += 1
        if not one.wrong:
            return apply(*args)
        if index not in self._maps:
            state = random_state()
            self._maps[index] = [_linear(one, which) for which in one.wrong]
            set_random_state(state)
        return as_function(lambda: self._mapped(index, one, args, apply))

    def _mapped(self, index: int, one: Applied, args: tuple[Any, ...], apply: Callable[..., Any]) -> Tensor:
        assert one.wrong is not None
        frozen = [one.args[at].detach() if at in one.wrong else arg for at, arg in enumerate(args)]
        result: Tensor = apply(*frozen).detach()
        for at, linear in zip(one.wrong, self._maps[index], strict=True):
            if linear is not None:
                result = result + linear(args[at].detach() - one.args[at].detach())
        return result


def _copy(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return arg.detach().clone().requires_grad_(arg.requires_grad)


def _linear(one: Applied, which: int) -> Callable[[Tensor], Tensor] | None:
    """The map whose transpose backward is, for one input; None where backward cannot be differentiated."""
    arriving = torch.zeros_like(one.output).requires_grad_()
    found = one.backward(arriving, again=True)[1][one.variable.index(which)]
    if found is None or not found.requires_grad:
        return None

    def linear(change: Tensor) -> Tensor:
        (result,) = torch.autograd.grad(found, arriving, change, retain_graph=True, allow_unused=True)
        return torch.zeros_like(one.output) if result is None else result.detach()

    return linear


def _wrong_inputs(one: Applied, *, beside: bool = False) -> dict[int, Off]:
    """Which inputs get another gradient than the derivative along two random directions, by central differences; at a
    kink `beside` it."""
    arriving = one.arrived if one.arrived is not None else random_direction(one.output, "arriving")
    epsilon = torch.finfo(one.output.dtype).eps
    _, gradients = one.backward(arriving)
    wrong: dict[int, Off] = {}
    for at, gradient in zip(one.variable, gradients, strict=True):
        found: list[tuple[float, Derivative]] = []
        for seed in ("first", "second"):
            value = one.args[at].detach()
            direction = random_direction(value, seed) * (float(value.double().square().mean().sqrt()) or 1.0)
            analytic = 0.0 if gradient is None else inner(gradient, direction)
            natural = 0.0 if gradient is None else float((gradient.double() * direction.double()).norm())
            size = float((arriving.double() * one.output.double()).norm())

            def along(t: float, at: int = at, value: Tensor = value, direction: Tensor = direction) -> float:
                return inner(arriving, one.run({at: value + t * direction}).detach())

            numeric = differentiate(along, steps(epsilon), epsilon, size, 0.0, along(0.0))
            if numeric.kinked and not beside:
                return _wrong_inputs(_moved(one), beside=True)
            if judge(analytic, numeric, natural, size, 8 * epsilon) == "wrong":
                found.append((analytic, numeric))
        if found:
            wrong[at] = _off(found)
    return wrong


def _moved(one: Applied) -> Applied:
    """The same function, applied beside the point where it was."""
    args = list(one.args)
    for at in one.variable:
        value = args[at].detach()
        size = float(value.double().square().mean().sqrt()) or 1.0
        args[at] = (value + BESIDE * size * random_direction(value, f"beside {at}")).requires_grad_()
    return replace(one, args=tuple(args))


def _off(found: list[tuple[float, Derivative]]) -> Off:
    if all(abs(numeric.value) <= 5 * numeric.error for _, numeric in found):
        return Off("flat", None)
    if all(analytic == 0.0 for analytic, _ in found):
        return Off("cut", 0.0)
    ratios = [analytic / numeric.value for analytic, numeric in found if numeric.value]
    alike = len(ratios) > 1 and max(ratios) - min(ratios) <= 1e-3 * abs(ratios[0])
    return Off("scaled", ratios[0]) if alike else Off("other", None)


@contextlib.contextmanager
def _replaced(instead: Callable[[type, tuple[Any, ...], Callable[..., Any]], Any]) -> Iterator[None]:
    """While open, `instead` is asked in place of every application of a Function that is not torch's own; it is not
    asked for what happens inside of one."""
    original = Function.__dict__["apply"]
    inside = False

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside

        def run(*given: Any) -> Any:
            return application(original)(cls, *given, **kwargs)

        if inside or kwargs or cls.__module__.startswith("torch."):
            return run(*args)
        inside = True
        try:
            return instead(cls, args, run)
        finally:
            inside = False

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]
