"""What the autograd graph behind a backward root holds, by the names of its nodes (torch.autograd.graph.Node)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.probes.backward.graph_leaves import name_of as name_of
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses import log_probs
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.marks import has_other_outputs, is_labelled, is_recorded

MAX_NODES = 100
"""Nodes behind a root, or behind one of its terms, that are looked at; a trainer's losses lie within ten of it."""
PICKS = {"GatherBackward": "_saved_index", "IndexBackward": "_saved_indices", "TakeBackward": "_saved_index"}
OTHERS = {
    "MseLossBackward": "mse_loss",
    "SmoothL1LossBackward": "smooth_l1_loss",
    "HuberLossBackward": "huber_loss",
    "BinaryCrossEntropyBackward": "binary_cross_entropy",
    "BinaryCrossEntropyWithLogitsBackward": "binary_cross_entropy_with_logits",
    "KlDivBackward": "kl_div",
    "LogSigmoidBackward": "logsigmoid",
    "CtcLossBackward": "ctc_loss",
    "SoftMarginLossBackward": "soft_margin_loss",
    "MultiMarginLossBackward": "multi_margin_loss",
}
CURVED = {
    *("ExpBackward", "LogBackward", "Log1PBackward", "PowBackward", "SqrtBackward", "SigmoidBackward", "TanhBackward"),
    *("SoftplusBackward", "LogSigmoidBackward", "SoftmaxBackward", "LogSoftmaxBackward", "LogsumexpBackward"),
}
"""Between a loss and the root: what such a node passes on depends on the loss itself."""
LARGEST = {"TopkBackward", "SortBackward"}
"""What takes the largest of a tensor's elements: hard examples."""
PRODUCTS = {"MulBackward", "DivBackward"}
FACTORS = {*PRODUCTS, "NegBackward"}
"""What multiplies by a number, where one operand alone has a gradient."""
MAX_FACTORS = 16
COPIES = {"CloneBackward", "AliasBackward", "ToCopyBackward"}
PARTED = {"UnbindBackward", "SplitBackward", "SplitWithSizesBackward"}
"""What gives the parts of a tensor one by one."""
MODEL = {"AddmmBackward", "MmBackward", "BmmBackward", "ConvolutionBackward", "NativeLayerNormBackward"}


class End(Enum):
    """What a node behind a root is, where nothing is looked for behind it."""

    COUNTED = "a loss that counts tokens"
    NAMED = "a loss of another kind"
    MODEL = "a part of the model"


class Found:
    """What the graph behind a root shows. `picks` are elements taken by an index, with the node that they are from,
    `largest` the nodes that take the largest ones."""

    def __init__(self) -> None:
        self.known: list[Any] = []  # recorded already
        self.cross_entropies: list[Any] = []
        self.picks: list[tuple[Any, Any]] = []
        self.largest: list[Any] = []
        self.log_softmaxes: list[Any] = []
        self.labelled: list[Any] = []
        self.logsumexp_inputs: set[Any] = set()
        self.others: list[str] = []
        self.of_others: list[Any] = []  # the nodes of these
        self.losses: list[Any] = []
        self.above: dict[Any, list[Any]] = {}  # from a node to those that its output goes into

    def is_computed(self, more: Sequence[Any] = ()) -> bool:
        """Whether a loss, or one of `more`, is multiplied, on its way to the root, by something that has a gradient
        itself (a learned weight, a focal factor), or goes through a curve: its weight is of the data then."""
        queue, visited = deque([*self.losses, *more]), set[Any]()
        while queue:
            for node in self.above.get(queue.popleft(), ()):
                if node in visited:
                    continue
                visited.add(node)
                if name_of(node) in CURVED or is_product(node):
                    return True
                queue.append(node)
        return False


def search(roots: Sequence[Root]) -> Found:
    """The losses behind the roots of a backward pass, down to where the model begins."""
    found = Found()
    queue: deque[tuple[Any, int]] = deque((root.grad_fn, root.output_nr) for root in roots)
    visited: set[Any] = set()

    def descend(node: Any) -> None:
        for following, output in _unlike(node.next_functions):
            found.above.setdefault(following, []).append(node)
            queue.append((following, output))

    while queue and len(visited) < MAX_NODES:
        node, output = queue.popleft()
        if node is None or node in visited or has_other_outputs(node, output):
            continue
        visited.add(node)
        if is_recorded(node, output):
            found.known.append(node)
            found.losses.append(node)
            continue
        if is_labelled(node):
            found.labelled.append(node)
            found.losses.append(node)
            continue
        name = name_of(node)
        if name in ("NllLossBackward", "NllLoss2DBackward") and saved(node, "_saved_target", by_torch=True) is not None:
            found.cross_entropies.append(node)
            found.losses.append(node)
        elif name in PICKS and not selects_rows(node) and saved(node, PICKS[name], by_torch=True) is not None:
            source = source_of(node)
            found.picks.append((node, source))
            if name_of(source) != "LogSoftmaxBackward":
                descend(node)
            else:
                found.losses.append(node)
        elif name == "LogSoftmaxBackward":
            found.log_softmaxes.append(node)
        elif name == "LogsumexpBackward":
            found.logsumexp_inputs |= _normalised(source_of(node))
        elif name in OTHERS:
            found.others.append(OTHERS[name])
            found.of_others.append(node)
            if name in CURVED:
                descend(node)
        elif name not in MODEL:
            if name in LARGEST:
                found.largest.append(node)
            descend(node)
    return found


def _unlike(inputs: Sequence[tuple[Any, int]]) -> Sequence[tuple[Any, int]]:
    """The inputs of a node, one of them where they are logsumexps of a tensor's rows that are taken one by one."""
    if len(inputs) < 2 or any(name_of(node) != "LogsumexpBackward" for node, _ in inputs):
        return inputs
    rows = {source_of(node) for node, _ in inputs}
    return inputs[:1] if len(rows) == 1 and name_of(rows.pop()) in PARTED else inputs


COUNTED = {"NllLossBackward", "NllLoss2DBackward", "LogSoftmaxBackward", "LogsumexpBackward"}


def end_of(found: Found, node: Any, output: int) -> End | None:
    """What an output of a node is; None: that is to be seen behind it."""
    name = name_of(node)
    if _is_squared_logsumexp(node) or has_other_outputs(node, output):
        return End.MODEL
    if (
        is_recorded(node, output)
        or is_labelled(node)
        or name in COUNTED
        or (name in PICKS and source_of(node) in found.logsumexp_inputs)
    ):
        return End.COUNTED
    if name in OTHERS:
        return End.NAMED
    return End.MODEL if name in MODEL else None


def _is_squared_logsumexp(node: Any) -> bool:
    """Whether a node squares a logsumexp: a z-loss (ST-MoE, arXiv 2202.08906), and no half of a cross-entropy."""
    if name_of(node) not in ("PowBackward", "MulBackward"):
        return False
    operands = [_seen_through(following) for following, _ in node.next_functions]
    return bool(operands) and all(name_of(operand) == "LogsumexpBackward" for operand in operands)


def dtype_of(node: Any, output: int) -> torch.dtype | None:
    """Of an output of a node; None where this torch does not tell."""
    outputs = getattr(node, "_input_metadata", ())
    return outputs[output].dtype if output < len(outputs) else None


def rows_of(node: Any, dim: int) -> int | None:
    """How many rows of `dim` a node's first output has; None where this torch does not tell."""
    shapes = [[*output.shape] for output in getattr(node, "_input_metadata", ())]
    return prod(shapes[0]) // max(shapes[0][dim], 1) if shapes else None


def edges_of(node: Any) -> list[tuple[Any, int]]:
    """The inputs of a node that have a gradient: other nodes, and which of their outputs."""
    return [edge for edge in node.next_functions if not _is_number(*edge)] if node is not None else []


def operands_of(node: Any) -> list[Any]:
    """The nodes of those inputs that have a gradient."""
    return [following for following, _ in edges_of(node)]


def _is_number(node: Any, output: int, hops: int = log_probs.MAX_HOPS) -> bool:
    """Whether an input has no gradient: none of the graph's, or made of a number that was put into one tensor with a
    loss (sums and counts that ranks add up in one collective) and taken out of it again."""
    if node is None:
        return True
    if not hops:
        return False
    edges = node.next_functions
    if (place := _place_taken(node, output)) is not None:
        edges = _put_together(node).next_functions[place : place + 1]
    return bool(edges) and all(_is_number(following, nr, hops - 1) for following, nr in edges)


def _put_together(node: Any) -> Any:
    """The node that made a node's first input, seen through copies."""
    made = node.next_functions[0][0] if node.next_functions else None
    while made is not None and name_of(made) in COPIES:
        made = made.next_functions[0][0]
    return made


def _place_taken(node: Any, output: int) -> int | None:
    """Which of the numbers that were put together in one tensor a node's output is; None where it is none of these."""
    name = name_of(node)
    if name not in ("UnbindBackward", "SelectBackward", "SliceBackward"):
        return None
    made = _put_together(node)
    if name_of(made) not in ("StackBackward", "CatBackward") or made._saved_dim != 0:
        return None
    if name == "UnbindBackward":
        return output if name_of(made) == "StackBackward" and node._saved_dim == 0 else None
    if node._saved_dim != 0:
        return None
    size = node._saved_self_sym_sizes[0]
    begin = node._saved_index if name == "SelectBackward" else node._saved_start
    begin -= 2**64 if begin >= 2**63 else 0  # autograd keeps a negative one as an unsigned number
    alone = name == "SelectBackward" or (min(node._saved_end, size) - begin % size, node._saved_step) == (1, 1)
    return int(begin % size) if alone and len(made.next_functions) == size else None


def function_of(root: Any) -> str | None:
    """The autograd function of the program's or a library's own, not of torch's, that a root is a multiple of."""
    node = root
    for _ in range(MAX_FACTORS):
        operands = operands_of(node) if name_of(node) in FACTORS else []
        if len(operands) != 1:
            break
        node = operands[0]
    written = getattr(type(node), "_forward_cls", None)
    return written.__name__ if written is not None and not written.__module__.startswith("torch.") else None


def saved(node: Any, name: str, by_torch: bool = False) -> Any:
    """What a node keeps for backward. None where hooks keep it: they may give it out once, and a checkpoint runs its
    function once more for it, whatever that draws or counts. `by_torch`: those of torch.autograd.graph, which copy to
    another place and back, may be asked, for backward has not begun."""
    kept = getattr(node, f"_raw{name}", None)
    for one in kept if isinstance(kept, (tuple, list)) else (kept,):
        hook = getattr(one, "unpack_hook", None)
        if hook is not None and not (by_torch and getattr(hook, "__module__", "") == "torch.autograd.graph"):
            return None
    return getattr(node, name, None)


def other_operand(node: Any) -> Tensor | None:
    """What a product or quotient multiplies by, which has no gradient."""
    for name in ("_saved_other", "_saved_self"):
        other = saved(node, name, by_torch=True)
        if isinstance(other, Tensor) and not other.requires_grad:
            return other
    return None


def is_times_zero(node: Any) -> bool:
    """Whether a node multiplies by zero, as far as that is known without waiting for an accelerator."""
    other = other_operand(node) if name_of(node) == "MulBackward" else None
    return type(other) is Tensor and other.numel() == 1 and is_host(other) and float(other) == 0


def dim_of(node: Any) -> int:
    """Along which a node acts; autograd keeps a negative one as an unsigned number."""
    dim: int = node._saved_dim
    return dim if dim < 2**63 else dim - 2**64


def is_product(node: Any) -> bool:
    """Whether a node multiplies or divides what both have gradients."""
    return name_of(node) in PRODUCTS and len(operands_of(node)) > 1


def op_of(node: Any) -> str:
    """The operation that a node differentiates, in words."""
    name = name_of(node)
    return OTHERS.get(name) or name.removesuffix("Backward").lower()


def source_of(node: Any) -> Any:
    """The node that made a node's first input, seen through views and copies."""
    return _seen_through(node.next_functions[0][0]) if node is not None and node.next_functions else None


def _seen_through(node: Any) -> Any:
    for _ in range(log_probs.MAX_HOPS):
        passes = name_of(node).startswith(log_probs.PASS_THROUGH) or selects_rows(node) or _expands_nothing(node)
        if not passes or not node.next_functions:
            break
        node = node.next_functions[0][0]
    return node


def selects_rows(node: Any) -> bool:
    """Whether a node leaves out rows by a mask, all classes of each."""
    if name_of(node) != "IndexBackward":
        return False
    indices = saved(node, "_saved_indices", by_torch=True) or (None,)
    mask = indices[0]
    if len(indices) != 1 or mask is None or mask.dtype is not torch.bool:
        return False
    return bool(mask.dim() < len(node._saved_self_sym_sizes))


def _expands_nothing(node: Any) -> bool:
    """As torch.take_along_dim does, to indices that are as large already."""
    if name_of(node) != "ExpandBackward":
        return False
    shapes = [[*output.shape] for output in getattr(node, "_input_metadata", ())]
    return shapes[:1] == [[*node._saved_self_sym_sizes]]


def _normalised(source: Any) -> set[Any]:
    """What a logsumexp normalises: its input, or the pieces that this was put together from (logits of candidates from
    several places), or what it is a row of."""
    if name_of(source) in PARTED:
        return {source, source_of(source)}
    if name_of(source) != "CatBackward":
        return {source}
    return {source, *(_seen_through(piece) for piece, _ in source.next_functions)}


def log_probs_of(node: Any) -> Any:
    """What labels are picked from, seen through a sign."""
    source = source_of(node)
    return source_of(source) if name_of(source) == "NegBackward" else source
