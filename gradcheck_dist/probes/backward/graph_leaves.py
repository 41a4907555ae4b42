"""Which leaves an autograd graph leads to, up to functions of somebody's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.recording.marks import hooks_of

MAX_NODES = 256
LEAF_NODE = "torch::autograd::AccumulateGrad"
"""The name of the node that adds a gradient to its parameter's."""
_SHIFTS = ("AddBackward", "SubBackward")


def name_of(node: Any) -> str:
    """The name of a node's operation, without namespace and version; "" for none."""
    return node.name().rpartition("::")[2].rstrip("0123456789") if node is not None else ""


def leaves_in_front(tensor: Root, *, through_functions: bool = False) -> list[Tensor]:
    """The leaves that a tensor was computed from by torch's own functions alone; what lies in front of a
    torch.autograd.Function, or of a hook of the program's, is left out, for nobody knows what these do to a gradient.
    `through_functions`: it is not."""
    found: list[Tensor] = []
    stack: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    seen: set[Any] = set()
    while stack and len(seen) < MAX_NODES:
        node, output = stack.pop()
        if node is None or node in seen:
            continue
        if not through_functions and (hasattr(type(node), "_forward_cls") or hooks_of(node, output)):
            continue
        seen.add(node)
        if node.name() == LEAF_NODE:
            found.append(node.variable)
        stack += node.next_functions
    return found


def shifted_leaves(tensor: Tensor) -> list[Tensor]:
    """The leaves in front of a tensor to which another of their shape, without gradient, was added before anything else
    was done with them: forward has other numbers than their gradient is of (`bias + (bias / n - bias).detach()`)."""
    shifted: dict[Tensor, bool] = {}
    stack: list[Any] = [tensor.grad_fn]
    seen = set(stack)
    while stack and len(seen) < MAX_NODES:
        node = stack.pop()
        if node is None or hasattr(type(node), "_forward_cls"):
            continue
        edges = [following for following, _ in node.next_functions]
        for following in edges:
            if following is not None and following.name() == LEAF_NODE:
                shifts = name_of(node) in _SHIFTS and None in edges
                shifts = shifts and list(node._input_metadata[0].shape) == list(following.variable.shape)
                shifted[following.variable] = shifts and shifted.get(following.variable, True)
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return [leaf for leaf, shifts in shifted.items() if shifts]
