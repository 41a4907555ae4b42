"""The terms that a loss adds up, and which of them hold no loss that anybody counts tokens of."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradcheck_dist.events import LossTerm
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses.loss_graph import (
    FACTORS,
    MAX_NODES,
    End,
    Found,
    edges_of,
    end_of,
    is_times_zero,
    name_of,
    op_of,
)
from gradcheck_dist.probes.recording.deferred import number
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded

MAX_TERMS = 16
"""Terms of one backward pass whose weights are recorded."""
SUMS = {"AddBackward", "SubBackward"}
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
    summands: list[tuple[Any, int]] = []
    todo: list[tuple[Any, int]] = [(root.grad_fn, root.output_nr)] if root.grad_fn is not None else []
    while todo and len(summands) < MAX_NODES:
        node, output = todo.pop()
        name = name_of(node)
        goes_on = (name in SUMS or name in FACTORS) and end_of(graph, node, output) is None
        operands = edges_of(node) if goes_on else []
        if name == HANDS_ON and node.next_functions[output][0] is not None:
            todo.append(node.next_functions[output])
        elif goes_on and (name in SUMS or len(operands) == 1):
            todo += operands if not is_times_zero(node) else []
        else:
            summands.append((node, output))
    found = Terms()
    for node, output in summands if len(summands) > 1 else ():
        ends = _ends(graph, node, output)
        if End.COUNTED not in ends:
            (found.named if End.NAMED in ends else found.others).append(node)
    return found


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
