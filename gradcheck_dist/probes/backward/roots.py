"""What a backward pass starts from: tensors, or edges of the graph whose tensors are gone.

Pipelines let go of what they sent (torch 2.15), and start from `torch.autograd.graph.GradientEdge`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge


class Root(Protocol):
    """Tensors are roots as they are."""

    @property
    def grad_fn(self) -> Any: ...

    @property
    def output_nr(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def numel(self) -> int: ...


class _Edge(NamedTuple):
    """A tensor's place in the graph: output `output_nr` of the node `grad_fn`."""

    grad_fn: Any
    output_nr: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grad_fn._input_metadata[self.output_nr].shape)

    def numel(self) -> int:
        return math.prod(self.shape)


def roots_of(given: Any, towards: Any = None) -> list[Root]:
    """The roots among what torch.autograd.backward or grad was given: one tensor or edge, or a sequence of them.

    `towards`: what autograd.grad differentiates for. Where these are edges, too, the pass is the part for the weights
    that a zero-bubble schedule puts off, and edges are where the part for the inputs broke off: no roots of a graph.
    """
    edges = [_Edge(*root[:2]) if isinstance(root, GradientEdge) else root for root in _several(given)]
    put_off = any(isinstance(one, GradientEdge) for one in _several(towards))
    return [root for root in edges if isinstance(root, Tensor if put_off else Tensor | _Edge)]


def _several(given: Any) -> Any:
    return [given] if isinstance(given, Tensor | GradientEdge | None) else given
