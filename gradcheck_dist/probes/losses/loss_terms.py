"""The terms that a loss adds up, and which of them hold no loss that anybody counts tokens of."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradcheck_dist.events import LossTerm
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses.log_probs import PASS_THROUGH
from gradcheck_dist.probes.losses.loss_graph import (
    FACTORS,
    MAX_FACTORS,
    MAX_NODES,
    End,
    Found,
    edges_of,
    end_of,
    is_product,
    is_times_zero,
    name_of,
    op_of,
    other_operand,
)
from gradcheck_dist.probes.recording.deferred import number
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded

Edge = tuple[Any, int]
"""A node of the graph and which of its outputs."""
ONE: tuple[tuple[int, ...] | None, ...] = ((), (1,))
"""Shapes of one number."""
MAX_TERMS = 16
"""Terms of one backward pass whose weights are recorded."""
SUMS = {"AddBackward", "SubBackward"}
COPIES = (*PASS_THROUGH, "NanToNum")
WHOLE_SUMS = ("SumBackward", "NansumBackward")
JOINS = ("Stack", "Cat")
"""Losses that were put side by side: each may be a mean of its own."""
HANDS_ON = "_DDPSinkBackward"
"""Behind all outputs of a DDP module; gives each back as it is (torch/nn/parallel/distributed.py)."""


class Terms:
    """The summands of a root that are no counted losses: `named` hold a loss of a kind that is known, `others` (a
    distance, a penalty) do not."""

    def __init__(self) -> None:
        self.named: list[Any] = []
        self.others: list[Any] = []


def uncounted_terms(root: Root, graph: Found) -> Terms:
    """The summands of the scalar `root` that are no counted losses; none where it is no sum. A summand is
    followed through factors that have no gradient; what is multiplied by zero is none."""
    summands: list[Edge] = []
    todo: list[Edge] = [(root.grad_fn, root.output_nr)] if root.grad_fn is not None else []
    while todo and len(summands) < MAX_NODES:
        node, output = todo.pop()
        name = name_of(node)
        is_end = name != HANDS_ON and end_of(graph, node, output) is not None
        operands = edges_of(node) if name in SUMS or name in FACTORS else []
        if not is_end and (below := handed_on((node, output))) is not None:
            todo.append(below)
        elif not is_end and operands and (name in SUMS or len(operands) == 1):
            todo += operands if not is_times_zero(node) else []
        elif not is_end and (parts := _parts(graph, (node, output))):
            todo += parts
        else:
            summands.append((node, output))
    found = Terms()
    for node, output in summands if len(summands) > 1 else ():
        ends = _ends(graph, node, output)
        if End.COUNTED not in ends:
            (found.named if End.NAMED in ends else found.others).append(node)
    return found


def _parts(graph: Found, edge: Edge) -> Sequence[Edge]:
    """The numbers that one with a counted loss in it is made of by no product: what was put side by side and is added
    up, whatever weighs it there, or what a function (a clamp) was given. So are the terms of every token, where one
    number stands before a counted loss. None where it is made of anything else."""
    if shape_of(edge) not in ONE or End.COUNTED not in _ends(graph, *edge):
        return ()
    for _ in range(MAX_FACTORS):
        parts = edges_of(edge[0])
        if parts and all(shape_of(part) in ONE for part in parts) and not is_product(edge[0]):
            return parts
        if len(parts) > 1 and name_of(edge[0]).startswith((*SUMS, *JOINS)):
            return parts if any(_has_coefficient(graph, part) for part in parts) else ()
        if len(parts) != 1 or end_of(graph, *parts[0]) is not None:
            break
        edge = parts[0]
    return ()


def _has_coefficient(graph: Found, edge: Edge) -> bool:
    """Whether one number multiplies what holds a counted loss."""
    node, other = edge[0], other_operand(edge[0])
    is_number = name_of(node) == "MulBackward" and len(edges_of(node)) == 1 and (other is None or other.numel() == 1)
    return is_number and End.COUNTED in _ends(graph, *edge)


def side_by_side(edge: Edge) -> Sequence[Edge]:
    """The numbers that were put side by side and that a node adds up; none where it is no such sum."""
    (join, _), *others = edges_of(edge[0]) or [(None, 0)]
    if others or name_of(edge[0]) not in WHOLE_SUMS or not name_of(join).startswith(JOINS):
        return ()
    parts = edges_of(join)
    return parts if all(shape_of(part) in ONE for part in parts) else ()


def handed_on(edge: Edge) -> Edge | None:
    """What a node gives on as it is: an output of a DDP module, a copy or view, a number that is finite, a mean or sum
    over one number, a sum of this rank's number and others' that have no gradient."""
    node, output = edge
    name = name_of(node)
    following = node.next_functions if node is not None else ()
    if name == HANDS_ON:
        below: Edge = following[output]
        return below if below[0] is not None else None
    if not following or following[0][0] is None:
        return None
    if name in WHOLE_SUMS and name_of(following[0][0]).startswith(JOINS):
        join = following[0][0]
        own = edges_of(join)
        return own[0] if len(own) == 1 < len(join.next_functions) and shape_of(own[0]) in ONE else None
    alone = name in ("MeanBackward", "SumBackward") and shape_of(following[0]) == ()
    return following[0] if alone or (name.startswith(COPIES) and shape_of(following[0]) in ONE) else None


def shape_of(edge: Edge) -> tuple[int, ...] | None:
    """Of an output of a node; None where this torch does not tell."""
    outputs = getattr(edge[0], "_input_metadata", ())
    return tuple(outputs[edge[1]].shape) if edge[1] < len(outputs) else None


def _ends(graph: Found, node: Any, output: int) -> set[End]:
    """What lies behind a node's output, up to the first counted loss."""
    queue, visited, ends = deque([(node, output)]), set[Any](), set[End]()
    while queue and len(visited) < MAX_NODES and End.COUNTED not in ends:
        one, output = queue.popleft()
        if one is None or (one, output) in visited:
            continue
        visited.add((one, output))
        end = end_of(graph, one, output)
        if end is None:
            queue.extend(one.next_functions)
        else:
            ends.add(end)
    return ends


def watch_terms(recorder: Recorder, current: BackwardPass, nodes: Sequence[Any]) -> None:
    """Record what arrives at these summands in the pass that begins."""
    for ordinal, node in enumerate(nodes[:MAX_TERMS]):
        arrived = functools.partial(_arrived, recorder, current, ordinal, op_of(node))
        current.handles.append(node.register_prehook(arrived))


@guarded("unseen")
def _arrived(recorder: Recorder, current: BackwardPass, ordinal: int, op: str, grads: tuple[Any, ...]) -> None:
    """The term of a root that is no scalar has a weight for each element: it is left out."""
    grad = grads[0]
    if recorder.current is not current or not recorder.recording or grad is None or grad.numel() != 1:
        return
    emit_term(recorder, current, grad, op, ordinal)


def emit_term(recorder: Recorder, current: BackwardPass, grad: Tensor, op: str, ordinal: int, **fields: Any) -> None:
    """Record the weight of a term: the gradient, of one element, that arrives at it. `fields`: others of a LossTerm."""
    recorder.emit(
        LossTerm,
        site=current.site,
        accumulation_step=recorder.accumulation_step,
        microbatch=current.microbatch,
        ordinal=ordinal,
        op=op,
        weight=number(getattr(grad, "_local_tensor", grad).detach().reshape(())),
        stage=current.stage,
        **fields,
    )
