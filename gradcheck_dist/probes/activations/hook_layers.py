"""Activations that together take in all gradients of a backward pass, and what hooks on them multiply by.

Whether every way from the losses to a leaf goes through hooked activations shows in the graph, when backward begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import Event, LossGradient, LossTerm, Site
from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.recording.marks import hooks_of
from gradcheck_dist.probes.recording.recorder import Recorder

MAX_EDGES = 1000
"""Edges of the graph that are followed from the roots, or from one layer, to the next hooked activations."""
MAX_LAYERS = 4
MAX_ELEMENTS = 1 << 16
"""Of a larger gradient, elements at equal distances are compared."""
MAX_COUNT = 4096
"""Numbers up to this, and one over them, are what a gradient that was rounded is taken to be multiplied by."""
FITS = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
ROUNDED = 1e-4
"""Share of what a hook gives that may be no multiple of what it got, for other types."""
_WEIGHTS = (
    *("weight", "weight_min", "weight_max", "sample_weight", "beside_weights"),
    *("mean_weight", "reduced_weight", "element_min", "element_max", "whole"),
)
"""Fields of a LossGradient and a LossTerm that are gradients."""

OF_MODULE = "BackwardHookFunctionBackward"
"""The name of the node in which a module's backward hooks act."""

Edge = tuple[Any, int]
"""A node of the graph, and which of its outputs."""


@dataclass
class Layer:
    """Activations that together take in all gradients of a pass, `size` of them. `factors`: by activation, what its
    hooks came to; `first`: the seq number when the first of them ran."""

    size: int
    factors: dict[int, Tensor | float] = field(default_factory=dict)
    first: int | None = None
    is_scalar: bool = False
    site: Site | None = None

    def factor(self) -> Tensor | float:
        """What all of them were multiplied by; 1 where that is no one number."""
        found = list(self.factors.values())
        if len(found) < self.size or not any(isinstance(one, Tensor) for one in found):
            return 1.0
        place = next(one.device for one in found if isinstance(one, Tensor))
        values = torch.stack([torch.as_tensor(one, dtype=torch.float64, device=place) for one in found])
        alike = (values - values[0]).abs().max() <= ROUNDED * values[0].abs()  # not where one is NaN
        return torch.where(alike, values[0], 1.0)


class PassHooks:
    """The layers of one pass, and its events that wait for them."""

    def __init__(self, found: Sequence[Sequence[Edge]]) -> None:
        self._layers = [Layer(len(edges)) for edges in found]
        self._places: dict[int | Edge, tuple[Layer, int]] = {
            hook: (layer, place)
            for layer, edges in zip(self._layers, found, strict=True)
            for place, edge in enumerate(edges)
            for hook in _at(edge)
        }
        self._waiting: list[tuple[Callable[..., Event], dict[str, Any]]] = []
        self._over: int | None = None

    def has(self, hook: int) -> bool:
        return hook in self._places

    def ran(
        self, recorder: Recorder, hook: int | Edge, site: Site | None, grad: Tensor, factor: Tensor | float
    ) -> None:
        """A hook, or those of a module, multiplied `grad` by `factor`."""
        layer, place = self._places[hook]
        layer.first = recorder.next_seq() if layer.first is None else layer.first
        layer.is_scalar |= grad.numel() == 1
        layer.factors[place] = layer.factors.get(place, 1.0) * factor
        if isinstance(factor, Tensor) and layer.site is None:
            layer.site = site

    def takes(self, kind: Callable[..., Event], fields: dict[str, Any]) -> bool:
        """Whether an event waits."""
        if kind not in (LossGradient, LossTerm):
            return False
        self._waiting.append((kind, fields))
        return True

    def close(self, recorder: Recorder) -> None:
        """All hooks have run; what is told from here on is not told as it arrives."""
        self._over = recorder.next_seq()

    def release(self, recorder: Recorder) -> list[tuple[Callable[..., Event], dict[str, Any]]]:
        """What has waited, with the weights that the hooks behind the losses left."""
        try:
            self._weigh()
        except Exception as error:  # what has waited is told all the same
            recorder.failed("activation_hooks", error)
        return self._waiting

    def _weigh(self) -> None:
        over = math.inf if self._over is None else self._over
        first = min((fields["seq"] for _, fields in self._waiting if fields["seq"] < over), default=None)
        factor: Tensor | float = 1.0
        site = None
        for layer in self._layers:
            if layer.first is not None and (not layer.is_scalar if first is None else layer.first > first):
                factor, site = factor * layer.factor(), site or layer.site
        if isinstance(factor, Tensor):
            for _, fields in self._waiting:
                fields |= {name: fields[name] * factor for name in _WEIGHTS if fields.get(name) is not None}
                fields |= {"hooks_factor": factor, "hooks_site": site}


def some_of(tensor: Tensor) -> Tensor:
    """A copy of elements at equal distances, shape (count,)."""
    flat: Tensor = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
    step = -(-flat.numel() // MAX_ELEMENTS) | 1  # odd: no part of a vocabulary alone
    return flat[::step].clone()


def _at(edge: Edge) -> list[int | Edge]:
    """What tells the hooks on a tensor, and those of a module, apart."""
    return [*hooks_of(*edge), edge]


def multiple(got: Tensor, gave: Tensor) -> Tensor:
    """The number that elements of a gradient were multiplied by, NaN where it is none; 0-d, float64, where they lie."""
    if got.shape != gave.shape:
        return torch.full((), math.nan, dtype=torch.float64, device=got.device)
    fits, rounded = FITS.get(gave.dtype, ROUNDED), torch.finfo(gave.dtype).eps
    got, gave = got.double(), gave.double()
    factor = (gave @ got) / (got @ got)
    for power in (1, -1):
        whole = (factor**power).round()
        near = (whole.abs() <= MAX_COUNT) & ((factor**power - whole).abs() <= rounded * whole.abs())
        factor = torch.where(near & (whole != 0), whole**power, factor)
    return torch.where((gave - factor * got).norm() <= fits * gave.norm(), factor, torch.nan)


def layers_behind(roots: Sequence[Root]) -> list[list[Edge]]:
    """Sets of hooked activations, one behind the other, each of which every way from the roots goes through."""
    edges = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
    layers: list[list[Edge]] = []
    while len(layers) < MAX_LAYERS and (found := _next_layer(edges)):
        layers.append(found)
        edges = [edge for node in dict.fromkeys(node for node, _ in found) for edge in node.next_functions]
    return layers


def _next_layer(edges: Sequence[Edge]) -> list[Edge]:
    """The first hooked activations on all ways; [] where a way leads to a leaf beside them."""
    found: list[Edge] = []
    stack, seen = list(edges), set[Edge]()
    while stack:
        node, output = edge = stack.pop()
        if node is None or edge in seen:
            continue
        seen.add(edge)
        if hooks_of(node, output) or node.name() == OF_MODULE:
            found.append(edge)
        elif node.name() == LEAF_NODE or len(seen) > MAX_EDGES:
            return []
        else:
            stack += node.next_functions
    return found
