"""What probes note on nodes of the autograd graph, in their metadata (torch.autograd.graph.Node.metadata)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

RECORDED = "gradcheck"
"""The tensor that the node made is a loss that was recorded, with this id."""
LABELLED = "gradcheck_labels"
"""What a function with labels was given and gave: label_functions.Labelled."""


def mark_recorded(output: Tensor, loss_id: int) -> None:
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[RECORDED] = loss_id


def is_recorded(node: Any) -> bool:
    return RECORDED in node.metadata


def is_labelled(node: Any) -> bool:
    return LABELLED in node.metadata
