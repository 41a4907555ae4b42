"""All-gathers whose own part is put in the place of the copy where the parts are joined.

    dist.all_gather(parts, x)
    whole = torch.cat([x if rank == own else part for rank, part in enumerate(parts)])

A gather hands no gradient back. That a rank keeps its own part's shows in the graph of the next backward pass: a node
that joins as many tensors as ranks, all of one size, of which that part alone has a gradient. Of a gather that was
given a detached copy there is no node to be met; the part has its size then, and stands in the rank's own place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradcheck_dist.probes.activations.exchange_calls import Call
from gradcheck_dist.probes.activations.exchange_events import Watched
from gradcheck_dist.probes.backward.roots import Root

COPIES = ("View", "Reshape", "Unsafe", "Slice", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Transpose")
"""The begins of names of nodes that only copy, or lay out otherwise."""
JOINS = {"CatBackward", "StackBackward"}
MAX_GATHERS, MAX_NODES, MAX_HOPS = 16, 20_000, 6


class Gathered(NamedTuple):
    """A tensor that was gathered: the nodes that made it, seen through copies, each with which of their outputs it is,
    none where it was detached; how many elements it has, which of the parts is its own, and some of its elements."""

    made_by: list[tuple[Any, int]]
    size: int
    place: int
    told: Watched
    before: Tensor


class Gathers(list[Gathered]):
    """Those since the last backward pass began of which no own part was put into the list of parts."""

    def add_call(self, call: Call, told: Watched, before: Tensor) -> None:
        tensor = call.tensor
        if tensor is None or (tensor.grad_fn is None and not torch.is_grad_enabled()):
            return  # what an optimizer's ranks tell one another
        made_by = [] if tensor.grad_fn is None else _seen_through(tensor.grad_fn, tensor.output_nr)
        if len(self) == MAX_GATHERS:
            oldest = next((one for one in self if not one.made_by), None)  # gradients, or what is logged
            if oldest is None:
                return
            self.remove(oldest)
        self.append(Gathered(made_by, tensor.numel(), call.ranks.index(dist.get_rank()), told, before))

    def put_back(self, roots: Sequence[Root]) -> Iterator[tuple[Any, int, Gathered]]:
        """Those whose own part was joined with copies of the others, with the node that made it; forgets all."""
        waiting, joins = list(self), list(_joins(roots)) if self else []
        self.clear()
        for one in waiting:
            for node in joins:
                own = [edge for edge in node.next_functions if edge[0] is not None]
                num, joined = len(node.next_functions), prod(node._input_metadata[0].shape)
                if num != len(one.told.group) or len(own) != 1 or joined != num * one.size:
                    continue
                met = [place for place in _seen_through(*own[0]) if place in one.made_by]
                if not one.made_by and node.next_functions[one.place] == own[0] and _size_of(*own[0]) == one.size:
                    met = [own[0]]
                if met:
                    yield (*met[0], one)
                    break


def _joins(roots: Sequence[Root]) -> Iterator[Any]:
    """The nodes behind some roots that join tensors."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack and len(seen) < MAX_NODES:
        node: Any = stack.pop()
        if _name(node) in JOINS:
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _seen_through(node: Any, output: int) -> list[tuple[Any, int]]:
    """A node and, behind what only copies or lays out otherwise, those in front of it."""
    found = [(node, output)]
    for _ in range(MAX_HOPS):
        if not _name(node).startswith(COPIES) or node.next_functions[0][0] is None:
            break
        node, output = node.next_functions[0]
        found.append((node, output))
    return found


def _size_of(node: Any, output: int) -> int:
    """How many elements one of a node's outputs has."""
    return prod(node._input_metadata[output].shape)


def _name(node: Any) -> str:
    return str(node.name()).rpartition("::")[2].rstrip("0123456789")
