"""Which backward passes of a step differentiate one forward pass: tasks whose gradients are combined, a loss a head.

A later pass can only go through a graph that an earlier one kept (retain_graph, create_graph), so nothing is looked at
but behind such a pass. It marks the nodes that use parameters. Passes of one forward come to the same of these in every
parameter that both reach; another forward over the same parameters uses them in nodes of its own, also where both have
a cast of a weight, or an earlier chunk of a sequence, in common.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE, name_of
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.recording.marks import DIFFERENTIATED
from gradcheck_dist.probes.recording.recorder import Recorder

MAX_NODES = 20_000
"""Nodes of one graph that are looked at: some milliseconds, in passes that keep their graph or come behind one."""
LAID_OUT = (
    *("ToCopyBackward", "TBackward", "TransposeBackward", "PermuteBackward", "ViewBackward", "UnsafeViewBackward"),
    *("ReshapeAliasBackward", "ExpandBackward", "AliasBackward", "SplitBackward", "SplitWithSizesBackward"),
)
"""What makes another layout or type of a parameter, which several forward passes may share."""


class Forwards:
    """The forward passes of a step whose graphs are kept, by the seq of the first backward pass: the accumulation step
    of the first that brought parameters a gradient (one for inputs alone, as zero bubble begins, is no such step), and
    the parameters that passes of it reached, by id."""

    def __init__(self) -> None:
        self._step = -1
        self._number: dict[int, int] = {}
        self._reached: dict[int, set[int]] = {}

    def first_of(self, recorder: Recorder, roots: Sequence[Root], keeps_graph: bool) -> int | None:
        """The accumulation step of the first pass that brought parameters a gradient of the forward pass behind these
        roots; None where it is the one that begins, or where that cannot be told."""
        if self._step != recorder.step:
            self._step, self._number, self._reached = recorder.step, {}, {}
        if not (keeps_graph or self._reached) or recorder.in_pipeline or recorder.current is None:
            return None
        users = _users(roots)
        if not users:
            return None
        first = self._shared(users)
        recorder.current.forward = first
        if keeps_graph:
            seq = recorder.current.forward = recorder.current.seq if first is None else first
            self._reached.setdefault(seq, set()).update(users)
            for node in {node for nodes in users.values() for node in nodes}:
                node.metadata.setdefault(DIFFERENTIATED, seq)
        return None if first is None else self._number.get(first)

    def reached_parameters(self, forward: int, accumulation_step: int) -> None:
        """A pass of this forward brought parameters a gradient."""
        self._number.setdefault(forward, accumulation_step)

    def _shared(self, users: dict[int, set[Any]]) -> int | None:
        marks = {node.metadata.get(DIFFERENTIATED) for nodes in users.values() for node in nodes}
        known = [mark for mark in marks if mark in self._reached]
        if len(known) != 1:
            return None
        both = self._reached[known[0]] & users.keys()
        same = all(node.metadata.get(DIFFERENTIATED) == known[0] for leaf in both for node in users[leaf])
        return known[0] if same else None


def _users(roots: Sequence[Root]) -> dict[int, set[Any]]:
    """By parameter the nodes behind these roots that use it, seen through other layouts of it; nothing where the graph
    is too large."""
    found: dict[int, set[Any]] = {}
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = _leaf_behind(following)
            if leaf is not None:
                found.setdefault(id(leaf), set()).add(node)
            elif following not in seen:
                seen.add(following)
                stack.append(following)
        if len(seen) > MAX_NODES:
            return {}
    return found


def leaves_behind(roots: Sequence[Root]) -> Set[int]:
    """The ids of the parameters that these roots were computed from; none where the graph is too large."""
    return _users(roots).keys()


def _leaf_behind(node: Any) -> Any:
    """The parameter of which a node is another layout; None where it is something else."""
    while node is not None and node.name() != LEAF_NODE:
        if name_of(node) not in LAID_OUT:
            return None
        node = node.next_functions[0][0]
    return None if node is None else node.variable
