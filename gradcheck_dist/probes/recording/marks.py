"""What probes note on nodes of the autograd graph, in their metadata (torch.autograd.graph.Node.metadata)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

RECORDED = "gradcheck"
"""The tensor that the node made is a loss that was recorded, with this id."""
RECORDED_OUTPUT = "gradcheck_output"
"""Which of the node's outputs that is, where the others are none."""
TOLD = "gradcheck_told"
"""By output of the node, a loss that was found behind its evaluation: the step in which it was recorded, and its id."""
SEVERAL = "gradcheck_classes"
"""The loss that was recorded has several classes of each token."""
PICKED = "gradcheck_picked"
"""The node picks from negated log-probabilities, on this line (a Site or None)."""
LABELLED = "gradcheck_labels"
"""What a function with labels was given and gave: label_functions.Labelled."""

DIFFERENTIATED = "gradcheck_pass"
"""A pass that keeps its graph has gone through the node: the seq number of the first one of that forward pass."""

SENT = "gradcheck_sent"
"""By output of the node, some elements of what a stage sent, where it lets go of that (torch 2.15)."""

HOOKED = "gradcheck_hooks"
"""By output of the node, the numbers of the hooks that the program put on it."""

HANDS_ON = "gradcheck_hands_on"
"""The node is a function's that may hand on what it is given: whether it does, a bool, or 0-d on its device."""

FROM_ONE_NUMBER = "gradcheck_from_one_number"
"""The node subtracts one number from a tensor, or the reverse: a bool, or 0-d on its device."""

SUBTRACTED = "gradcheck_subtracted"
"""The node subtracts a tensor without a gradient, or is subtracted from it: some elements of that, 1-d."""
MAX_SUBTRACTED = 4096
"""So many at most."""

MULTIPLIED = "gradcheck_multiplied"
"""The node multiplies one number by another: by which instruction of the program, and whether that is reflected."""


def mark_recorded(tensor: Tensor, loss_id: int, output: int | None = None) -> None:
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[RECORDED] = loss_id
        if output is not None:
            node.metadata.setdefault(RECORDED_OUTPUT, set()).add(output)


def mark_several(tensor: Tensor) -> None:
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[SEVERAL] = True


def has_several(node: Any) -> bool:
    return SEVERAL in node.metadata


def is_recorded(node: Any, output: int) -> bool:
    return RECORDED in node.metadata and output in node.metadata.get(RECORDED_OUTPUT, (output,))


def has_other_outputs(node: Any, output: int) -> bool:
    """Whether this output stands beside a loss, in one node (a compiled model's logits)."""
    return RECORDED in node.metadata and not is_recorded(node, output)


def is_labelled(node: Any) -> bool:
    return LABELLED in node.metadata


def mark_hooked(tensor: Tensor, hook: int) -> None:
    node: Any = tensor.grad_fn
    node.metadata.setdefault(HOOKED, {}).setdefault(tensor.output_nr, []).append(hook)


def hooks_of(node: Any, output: int) -> list[int]:
    found: list[int] = node.metadata.get(HOOKED, {}).get(output, [])
    return found


def mark_hands_on(made: Tensor, same: bool | Tensor) -> None:
    node: Any = made.grad_fn
    node.metadata[HANDS_ON] = same


def hands_on(node: Any) -> bool | Tensor | None:
    """Whether a function hands on what it is given; None where it surely does not."""
    found: bool | Tensor | None = node.metadata.get(HANDS_ON)
    return found


def mark_from_one_number(node: Any, same: bool | Tensor) -> None:
    node.metadata[FROM_ONE_NUMBER] = same


def from_one_number(node: Any) -> bool | Tensor:
    found: bool | Tensor = node.metadata.get(FROM_ONE_NUMBER, False)
    return found


def mark_subtracted(node: Any, known: Tensor) -> None:
    if known.is_contiguous() or known.numel() <= MAX_SUBTRACTED:
        node.metadata[SUBTRACTED] = known.detach().reshape(-1)[:: max(-(-known.numel() // MAX_SUBTRACTED), 1)].clone()


def subtracted(node: Any) -> Tensor | None:
    """None where nothing is."""
    found: Tensor | None = node.metadata.get(SUBTRACTED)
    return found


def mark_multiplied(made: Tensor, at: tuple[Any, bool]) -> None:
    node: Any = made.grad_fn
    node.metadata[MULTIPLIED] = at


def multiplied(node: Any) -> tuple[Any, bool] | None:
    """None where nobody noted it."""
    found: tuple[Any, bool] | None = node.metadata.get(MULTIPLIED)
    return found
