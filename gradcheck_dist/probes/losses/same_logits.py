"""Which losses of one pass compare the same logits, each with labels of its own.

    loss = lam * cross_entropy(logits, labels) + (1 - lam) * cross_entropy(logits, others)

These are one loss whose targets are mixed (mixup, CutMix, bootstrapped labels), where the numbers before them come to
1. Two heads, two views of a batch and two parts of it have logits of their own, and so have the rows and the columns of
a table of similarities (CLIP).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gradcheck_dist.probes.losses.loss_graph import MODEL, dim_of, edges_of, name_of

MAX_NODES = 24
"""Behind a loss; torch's own smoothing of labels takes ten."""
WHOLE = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias")
"""The begins of names of what gives all of its input on, in the same order."""

Edge = tuple[Any, int]
Logits = tuple[Any, int, int]
"""An output of a node, and the dimension of the classes, from the last one."""


def on_same_logits(losses: dict[Any, int]) -> dict[int, int]:
    """For each loss that shares its logits with another one: which logits, numbered in the order of their losses.

    Args:
        losses: ids of the losses of one pass, by the node that computed them.
    """
    logits = {loss_id: found for node, loss_id in losses.items() if (found := _logits(node)) is not None}
    number = {of: index for index, (of, num) in enumerate(Counter(logits.values()).items()) if num > 1}
    return {loss_id: number[of] for loss_id, of in logits.items() if of in number}


def _logits(loss: Any) -> Logits | None:
    """What the only log_softmax behind a loss was given; None where there is none, or another way into the model."""
    found, todo, visited = set[Logits](), [loss], set[Any]()
    while todo:
        node = todo.pop()
        if node in visited:
            continue
        visited.add(node)
        if len(visited) > MAX_NODES or name_of(node) in MODEL:
            return None
        if name_of(node) == "LogSoftmaxBackward":
            dims = len(node._input_metadata[0].shape)
            found.add((*_made_by(node.next_functions[0]), dim_of(node) % dims - dims))
        else:
            todo += [following for following, _ in edges_of(node)]
    return found.pop() if len(found) == 1 else None


def _made_by(edge: Edge) -> Edge:
    """Where what an edge leads to was computed, behind what changes its shape or type alone."""
    node, output = edge
    for _ in range(MAX_NODES):
        if not name_of(node).startswith(WHOLE):
            break
        node, output = node.next_functions[0]
    return node, output
