"""Which calls of which modules a replay consists of: those that are kept to be checked, and those that are not.

A module that is called several times (shared weights, a loop) is checked at several calls, each on its own. A region
that a checkpoint runs without gradients in forward is seen when it is run again in backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcheck_dist.verify.capture import Output
from gradcheck_dist.verify.pieces import frozen, map_tensors, tensors_of
from gradcheck_dist.verify.preserve import RandomState, random_state
from gradcheck_dist.verify.twin import Twin

MAX_CALLS_EACH = 8
"""Of more calls of one module the first ones and the last are checked: each costs some dozens of its forward passes."""


@dataclass(eq=False)
class Call:
    """One call of a module in the replay, the `index`-th of it, inside of `parent`. `outputs` hold the gradients that
    arrived."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    index: int
    parent: Call | None
    outputs: list[Output] = field(default_factory=list)
    kept: bool = True

    @property
    def label(self) -> str:
        """The same on every rank, unlike for every call."""
        return f"{self.path} call {self.index}"

    @property
    def gives_gradients(self) -> bool:
        return any(output.requires_grad for output in self.outputs)

    def ancestors(self) -> Iterator[Call]:
        """The calls that it happened in."""
        around = self.parent
        while around is not None:
            yield around
            around = around.parent

    def keep(self, output: Output, gradient: Tensor) -> None:
        if self.kept and output.gradient is None:
            output.gradient = gradient.detach().clone()


@dataclass
class _Forward:
    """A call in forward: what it happened in, the random states before it and behind it."""

    parent: Call | None
    before: RandomState
    after: RandomState | None = None

    @property
    def draws(self) -> bool:
        return self.after is not None and not _same(self.before, self.after)


class Calls:
    """The calls below a twin's root. `kept` are in the order in which they began; `counts` are all with gradients, by
    path; `quiet` those without that were not run again. `redrawn`: what draws random numbers and is run again in
    backward from another random state than in forward, with what it happened in; the outermost ones.
    """

    def __init__(self, twin: Twin) -> None:
        self._names = twin.names
        self._stack: list[Call] = []
        self._backward = False
        self.kept: list[Call] = []
        self.counts: Counter[str] = Counter()
        self.quiet: dict[str, list[_Forward]] = {}
        self.redrawn: list[tuple[str, Call | None]] = []
        self._forward: dict[str, list[_Forward]] = {}
        self._inside = False  # of a region that is redrawn

    @contextlib.contextmanager
    def watched(self, *, backward: bool = False) -> Iterator[None]:
        """While open, calls are kept; in backward those alone that ran without gradients in forward."""
        self._backward = backward
        original = nn.Module._call_impl
        calls = self

        @functools.wraps(original)
        def watch(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = calls._names.get(id(self))
            if path is None:
                return original(self, *args, **kwargs)
            return calls._run(path, self, original, args, kwargs)

        nn.Module._call_impl = watch  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module._call_impl = original  # type: ignore[method-assign]

    def missing(self, path: str) -> str:
        """Which calls of a module were not kept, in words; "" when all were."""
        total, kept = self.counts[path], sum(call.path == path for call in self.kept)
        return f"calls {kept - 1} to {total - 2} of {total}" if kept < total else ""

    def _run(self, path: str, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        if self._backward:
            return self._run_again(path, module, original, args, kwargs)
        parent = self._stack[-1] if self._stack else None
        seen = _Forward(parent, random_state())
        self._forward.setdefault(path, []).append(seen)
        if torch.is_grad_enabled():
            result = self._run_kept(path, module, original, args, kwargs, parent)
        else:
            self.quiet.setdefault(path, []).append(seen)
            result = original(module, *args, **kwargs)
        seen.after = random_state()
        return result

    def _run_again(self, path: str, module: nn.Module, original: Any, args: Any, kwargs: Any) -> Any:
        earlier = self._forward.get(path, [])
        around, redrawn = self._inside, False
        if earlier and not around and any(one.draws for one in earlier):
            state = random_state()
            redrawn = not any(_same(one.before, state) for one in earlier)
        if redrawn:
            self.redrawn.append((path, earlier[-1].parent))
        self._inside = around or redrawn
        try:
            if torch.is_grad_enabled() and (waiting := self.quiet.get(path)):
                first = waiting.pop()  # backward comes to the last one first
                parent = self._stack[-1] if self._stack else first.parent
                return self._run_kept(path, module, original, args, kwargs, parent)
            return original(module, *args, **kwargs)  # a region that was seen in forward
        finally:
            self._inside = around

    def _run_kept(
        self, path: str, module: nn.Module, original: Any, args: Any, kwargs: Any, parent: Call | None
    ) -> Any:
        call = self._begun(path, module, args, kwargs, parent)
        self._stack.append(call)
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._stack.pop()
        for name, tensor in tensors_of(result):
            output = Output(name, tensor)
            call.outputs.append(output)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(call.keep, output))
        return result

    def _begun(self, path: str, module: nn.Module, args: Any, kwargs: Any, parent: Call | None) -> Call:
        given, named = map_tensors(frozen, (args, kwargs))
        call = Call(path, module, given, named, random_state(), self.counts[path], parent)
        self.counts[path] += 1
        if call.index >= MAX_CALLS_EACH:
            last = max((one for one in self.kept if one.path == path), key=lambda one: one.index)
            last.kept = False
            last.outputs.clear()
            self.kept.remove(last)
        self.kept.append(call)
        return call


def _same(one: RandomState, other: RandomState) -> bool:
    return all(
        torch.equal(one[device], other[device]) for device in ("cpu", "cuda") if device in one and device in other
    )
