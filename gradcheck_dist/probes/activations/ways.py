"""What all gradients of a backward pass are multiplied by on their ways from the losses to the leaves.

The stops on these ways, hooked activations and functions that hand on what they are given, show in the graph when
backward begins. What they multiply by is known behind it; where it is one number on every way, the loss weighs so much
more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcheck_dist.events import Event, LossGradient, LossTerm, Site
from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.recording import perhaps
from gradcheck_dist.probes.recording.marks import hands_on, hooks_of
from gradcheck_dist.probes.recording.recorder import Recorder

MAX_EDGES = 1000
"""Edges of the graph that are followed from the roots, or from the stops of one level, to the next ones."""
MAX_LEVELS = 4
MAX_ELEMENTS = 1 << 16
"""Of a larger gradient, elements at equal distances are compared."""
FEW = 64
"""Elements that tell whether a function hands on what it is given."""
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
class Stop:
    """A place where gradients of a pass may be multiplied. `behind`: the next ones on all ways from it, None is a leaf.

    `is_beside`: some way leads to a leaf beside this place and those as far from the roots. `first`: the seq number
    when the first of its hooks ran; `factor`: what they came to, NaN where that is no number."""

    behind: frozenset[int | None] = frozenset()
    is_beside: bool = False
    factor: Tensor | float = 1.0
    first: int | None = None
    is_scalar: bool = False
    site: Site | None = None


class PassHooks:
    """The stops of one pass, and its events that wait for them."""

    def __init__(self, ways: Ways) -> None:
        self._begin, self._stops = ways.begin, ways.stops
        self._places: dict[int | Edge, Stop] = {
            hook: stop for edge, stop in zip(ways.edges, ways.stops, strict=True) for hook in _at(edge)
        }
        self._waiting: list[tuple[Callable[..., Event], dict[str, Any]]] = []
        self._over: int | None = None

    def has(self, hook: int) -> bool:
        return hook in self._places

    def is_beside(self, hook: int) -> bool:
        """Whether some way leads to a leaf beside it, unless what lies there multiplies as it does."""
        return hook not in self._places or self._places[hook].is_beside

    def ran(
        self, recorder: Recorder, hook: int | Edge, site: Site | None, grad: Tensor, factor: Tensor | float
    ) -> None:
        """A hook, a function, or the hooks of a module, multiplied `grad` by `factor`."""
        stop = self._places[hook]
        stop.first = recorder.next_seq() if stop.first is None else stop.first
        stop.is_scalar |= grad.numel() == 1
        stop.factor = stop.factor * factor
        if isinstance(factor, Tensor) and stop.site is None:
            stop.site = site

    def takes(self, kind: Callable[..., Event], fields: dict[str, Any]) -> bool:
        """Whether an event waits."""
        if kind not in (LossGradient, perhaps.loss_gradient, LossTerm):
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
        counted = [self._counted(stop, first) for stop in self._stops]
        if not any(isinstance(one, Tensor) for one in counted):
            return

        @functools.cache
        def behind(place: int | None) -> Tensor | float:
            if place is None:
                return 1.0
            return counted[place] * alike([behind(one) for one in self._stops[place].behind])

        factor = alike([behind(one) for one in self._begin])
        if isinstance(factor, Tensor):
            sites = (stop.site for stop, one in zip(self._stops, counted, strict=True) if isinstance(one, Tensor))
            site = next((site for site in sites if site is not None), None)
            for _, fields in self._waiting:
                fields |= {name: fields[name] * factor for name in _WEIGHTS if fields.get(name) is not None}
                fields |= {"hooks_factor": factor, "hooks_site": site}

    def _counted(self, stop: Stop, first: int | None) -> Tensor | float:
        """What a stop multiplied by behind the place where the losses' weights were read."""
        if stop.first is None or (stop.is_scalar if first is None else stop.first <= first):
            return 1.0
        return torch.nan_to_num(stop.factor, nan=1.0) if isinstance(stop.factor, Tensor) else stop.factor


def alike(factors: Sequence[Tensor | float]) -> Tensor | float:
    """What all ways are multiplied by; 1 where that is no one number."""
    found = [one for one in factors if isinstance(one, Tensor)]
    if not found or len(found) < len(factors):
        return 1.0
    values = torch.stack([one.to(found[0].device) for one in found])
    same = (values - values[0]).abs().max() <= ROUNDED * values[0].abs()
    return torch.where(same, values[0], 1.0)


def some_of(tensor: Tensor, at_most: int = MAX_ELEMENTS) -> Tensor:
    """A copy of elements at equal distances, shape (count,)."""
    flat: Tensor = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
    step = -(-flat.numel() // at_most) | 1  # odd: no part of a vocabulary alone
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


class Ways(NamedTuple):
    """What gradients go through from the roots of a pass on: the first stops, and all of them, nearer ones first."""

    begin: frozenset[int | None]
    edges: list[Edge]
    stops: list[Stop]


def ways_behind(roots: Sequence[Root]) -> Ways:
    """The stops of a graph. Those behind more edges, or more stops, than are followed are left out."""
    origins = [[(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]]
    places: dict[Edge | None, int | None] = {None: None}
    edges: list[Edge] = []
    stops: list[Stop] = []
    begin: frozenset[int | None] = frozenset()
    is_beside = False
    for level in range(MAX_LEVELS):
        reached = _next_stops(origins)
        if level == 0 and None in reached[0]:
            break
        new = list(
            dict.fromkeys(edge for found in reached for edge in found if edge is not None and edge not in places)
        )
        is_beside |= any(None in found for found in reached)
        places |= {edge: place for place, edge in enumerate(new, len(edges))}
        edges += new
        behind = [frozenset(places[edge] for edge in found) for found in reached]
        if level == 0:
            (begin,) = behind
        else:
            for stop, found in zip(stops[-len(origins) :], behind, strict=True):
                stop.behind = found
        stops += [Stop(frozenset([None]), is_beside) for _ in new]
        if not new:
            break
        origins = [list(node.next_functions) for node, _ in new]
    return Ways(begin, edges, stops)


def _next_stops(origins: Sequence[Sequence[Edge]]) -> list[set[Edge | None]]:
    """By origin, the first stops on all ways behind its edges, None is a leaf; leaves alone behind too many edges."""
    reached: list[set[Edge | None]] = []
    num_seen = 0
    for edges in origins:
        found: set[Edge | None] = set()
        stack, seen = list(edges), set[Edge]()
        while stack:
            node, output = edge = stack.pop()
            if node is None or edge in seen:
                continue
            seen.add(edge)
            if hooks_of(node, output) or node.name() == OF_MODULE or hands_on(node) is not None:
                found.add(edge)
            elif node.name() == LEAF_NODE:
                found.add(None)
            else:
                stack += node.next_functions
            if num_seen + len(seen) > MAX_EDGES:
                return [{None} for _ in origins]
        num_seen += len(seen)
        reached.append(found)
    return reached
