"""The losses in a graph that torch.compile hands to a compiler, and how the graph's results come from them.

Dynamo's graph (torch.fx) calls torch's functions as the trainer's source does. Of a cross-entropy in it a few
operations matter: those that make its labels out of the graph's inputs, and those between it and a result, such as a
division by a number of tokens. None of them needs the model.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

LOSSES = {"cross_entropy", "nll_loss"}
MAX_NODES = 64
"""Operations that are run again for one loss; more of them are a model."""
_SUMS = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub, "add", "sub", "add_", "sub_"}
_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


@dataclass
class Way:
    """How one result of a graph comes from a loss: `behind`, in the order of the graph. `left_out` are summands beside
    the loss that take the model to compute, of which `num_terms` hold no loss of this kind."""

    result: Node
    index: int
    behind: list[Node]
    left_out: set[Node]
    num_terms: int


@dataclass
class CompiledLoss:
    """A cross-entropy in a graph. `before` makes its labels, and what else is needed of the graph's inputs, in the
    order of the graph; `ways` lead to the results that come from it."""

    op: str
    target: Node
    weight: Node | None
    ignore_index: int | Node
    reduction: str
    call: Node
    before: list[Node]
    ways: list[Way]
    stack_trace: str

    def fed(self, graph: GraphModule, inputs: tuple[Any, ...]) -> dict[Node, Any]:
        """The values of the graph's inputs, and of all nodes in front of the loss that are needed."""
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
        for node in self.before:
            if node.op != "placeholder":
                values[node] = _run(graph, node, values)
        return values

    def result_of(self, way: Way, graph: GraphModule, loss: Tensor, values: dict[Node, Any]) -> Any:
        """A result for a value of the loss, differentiably."""
        values = values | dict.fromkeys(way.left_out, 0.0) | {self.call: loss}
        for node in way.behind:
            values[node] = _run(graph, node, values)
        return values[way.result]


def losses_of(graph: GraphModule) -> list[CompiledLoss]:
    """The losses of a graph whose labels and whose way to a result are known; none is left half known."""
    nodes = list(graph.graph.nodes)
    calls = [node for node in nodes if node.op == "call_function" and _is_loss(node.target)]
    results = nodes[-1].args[0] if nodes and nodes[-1].op == "output" else ()
    if not calls or not isinstance(results, tuple | list):
        return []
    read = [_Reader(nodes, calls, call).read(results) for call in calls]
    return [loss for loss in read if loss is not None]


def _is_loss(target: Any) -> bool:
    of_torch = getattr(target, "__module__", None) == "torch.nn.functional"
    return of_torch and getattr(target, "__name__", "") in LOSSES


class _NotKnownError(Exception):
    """A part of the graph that is not run again."""


class _Reader:
    def __init__(self, nodes: list[Node], calls: list[Node], call: Node) -> None:
        self._nodes, self._calls, self._call = nodes, calls, call
        self._below = _closure(call, lambda node: node.users)
        self._trained = _trained(nodes)
        self._needed: set[Node] = set()

    def read(self, results: Sequence[Any]) -> CompiledLoss | None:
        try:
            given = _arguments(self._call)
            target, weight = given["target"], given.get("weight")
            if not isinstance(target, Node) or not isinstance(weight, Node | None):
                return None
            ignore_index = given.get("ignore_index", -100)  # a number of the graph's own where shapes are dynamic
            for node in (target, weight, ignore_index):
                if isinstance(node, Node):
                    self._need(node)
            ways = [self._way(result, index) for index, result in enumerate(results) if self._comes_from(result)]
        except _NotKnownError:
            return None
        if not ways or len(self._needed) + sum(len(way.behind) for way in ways) > MAX_NODES:
            return None
        return CompiledLoss(
            op=self._call.target.__name__,  # type: ignore[union-attr]
            target=target,
            weight=weight,
            ignore_index=ignore_index if isinstance(ignore_index, Node) else int(ignore_index),
            reduction=str(given.get("reduction", "mean")),
            call=self._call,
            before=[node for node in self._nodes if node in self._needed],
            ways=ways,
            stack_trace=self._call.stack_trace or "",
        )

    def _comes_from(self, result: Any) -> bool:
        return result is self._call or result in self._below

    def _way(self, result: Node, index: int) -> Way:
        left_out: set[Node] = set()
        behind = self._behind(result, left_out)
        return Way(result, index, behind, left_out, sum(not self._holds_loss(node) for node in left_out))

    def _behind(self, result: Node, left_out: set[Node]) -> list[Node]:
        """The nodes from the loss to the result; what else goes into them is needed, or left out of a sum."""
        between = (_closure(result, lambda node: node.all_input_nodes) | {result}) & self._below
        for node in between:
            if node.op not in ("call_function", "call_method") or (
                _is_in_place(node) and node.args[0] not in between | {self._call}
            ):
                raise _NotKnownError
            for operand in node.all_input_nodes:
                if operand in between or operand is self._call:
                    continue
                if operand not in self._trained:
                    self._need(operand)
                elif node.target in _SUMS:
                    left_out.add(operand)
                else:
                    raise _NotKnownError
        return [node for node in self._nodes if node in between]

    def _need(self, node: Node) -> None:
        """Let a node be run in front of the loss."""
        for one in _closure(node, lambda node: node.all_input_nodes) | {node}:
            if one in self._trained or _is_in_place(one) or one.op not in _RUN_AGAIN:
                raise _NotKnownError
            self._needed.add(one)

    def _holds_loss(self, node: Node) -> bool:
        return bool((_closure(node, lambda node: node.all_input_nodes) | {node}) & set(self._calls))


_RUN_AGAIN = {"placeholder", "get_attr", "call_function", "call_method"}


def _trained(nodes: list[Node]) -> set[Node]:
    """The nodes that depend on something with a gradient."""
    found: set[Node] = set()
    for node in nodes:
        value = node.meta.get("example_value")
        has_gradient = isinstance(value, Tensor) and value.requires_grad
        if (node.op == "placeholder" and has_gradient) or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _closure(node: Node, following: Callable[[Node], Any]) -> set[Node]:
    found: set[Node] = set()
    waiting = list(following(node))
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += following(one)
    return found


def _is_in_place(node: Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return node.target in _IN_PLACE or node.target is operator.setitem or "out" in node.kwargs


def _arguments(call: Node) -> dict[str, Any]:
    bound = inspect.signature(call.target).bind(*call.args, **call.kwargs)  # type: ignore[arg-type]
    return dict(bound.arguments)


def _run(graph: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(graph)
    args = torch.fx.map_arg(node.args, values.__getitem__)
    kwargs = torch.fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
