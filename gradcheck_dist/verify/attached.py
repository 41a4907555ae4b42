"""Losses that a module attaches to an activation: an autograd function puts their gradient into backward.

Megatron-LM's MoEAuxLossAutoScaler does so. Such a loss stands in no output. It is found where a function gives
something although only zeros arrive at it; what it gives it to is the loss, or what the loss was made of. Forward shows
its value: the arguments of that function.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradcheck_dist.verify.inner import Base, Terms

if TYPE_CHECKING:
    from gradcheck_dist.verify.function import Function


@dataclass
class Injected:
    """What the functions of a graph gave for arriving zeros: (node, index of the tensor argument) -> gradient."""

    found: dict[tuple[Any, int], Tensor] = field(default_factory=dict)

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Look at all functions behind these outputs when backward passes."""
        for node in nodes_behind(outputs):
            if isinstance(node, BackwardCFunction):
                node.register_hook(self._hook(node))  # type: ignore[attr-defined]

    def _hook(self, node: Any) -> Any:
        def look(given: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]) -> None:
            if not any(_is_nonzero(grad) for grad in arrived):
                for index, grad in enumerate(given):
                    if _is_nonzero(grad):
                        self.found[node, index] = grad.detach().clone()  # type: ignore[union-attr]

        return look

    @property
    def classes(self) -> list[type]:
        return list(dict.fromkeys(node._forward_cls for node, _ in self.found))


@dataclass
class Attached(Terms):
    """The losses that are attached inside of a module call, as a number.

    `places`: which call of these classes, and which of its tensor arguments. `cotangents` are the gradients that were
    given to them.
    """

    function: Function
    classes: list[type]
    places: list[tuple[int, int]]
    cotangents: list[Tensor | None]
    share: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.variables, self.dtype = self.function.variables, self.function.dtype

    @property
    def module_call(self) -> Function:
        return self.function

    @property
    def path(self) -> str:
        return self.function.path

    def base(self, of_call: Base) -> Base:
        """The losses at the unperturbed point. Their gradient is what backward gives for arriving zeros."""
        nothing: dict[str, Tensor | None] = dict.fromkeys(of_call.added)
        with self.terms({}) as found:
            values = [term.detach() for term in found]
        return Base(values, of_call.added, nothing, of_call.epsilon, of_call.site)

    @contextlib.contextmanager
    def terms(self, variables: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
        with watched(self.classes) as calls, self.function.run(variables):
            yield [calls[call][1][index] for call, index in self.places]


Calls = list[tuple[Any, list[Tensor]]]


@contextlib.contextmanager
def watched(classes: Sequence[type]) -> Iterator[Calls]:
    """While open, every call of these functions is kept: (node, tensor arguments)."""
    calls: Calls = []
    saved = []
    for cls in classes:
        separate = "setup_context" in vars(cls)
        name = "setup_context" if separate else "forward"
        saved.append((cls, name, vars(cls).get(name)))
        setattr(cls, name, staticmethod(_kept(getattr(cls, name), calls, separate)))
    try:
        yield calls
    finally:
        for cls, name, original in saved:
            if original is None:
                delattr(cls, name)
            else:
                setattr(cls, name, original)


def _kept(original: Any, calls: Calls, separate: bool) -> Any:
    def keep(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if separate else args
        calls.append((ctx, [value for value in given if isinstance(value, Tensor)]))
        return original(ctx, *args, **kwargs)

    return keep


def nodes_behind(outputs: Sequence[Tensor]) -> Iterator[Any]:
    """Every node of the graph that made these tensors, once."""
    queue = deque(output.grad_fn for output in outputs)
    seen = set()
    while queue:
        node = queue.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            queue.extend(following for following, _ in node.next_functions)


def _is_nonzero(grad: Tensor | None) -> bool:
    return grad is not None and bool(getattr(grad, "_local_tensor", grad).any())
