"""Gradients of a replay, also where a checkpoint function brings them by a backward of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradcheck_dist.verify.pieces import dense


def gradients(
    outputs: Sequence[Tensor], arriving: Sequence[Tensor], leaves: Sequence[Tensor], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """What backward from `outputs` brings to `leaves`, detached and dense; None where nothing arrives.

    torch.autograd.grad gives what came through the graph. A function that runs its region again and calls
    torch.autograd.backward inside of its own (torch's reentrant checkpoint, Megatron-LM's) puts what it finds for the
    region's parameters into `.grad`, here that of the copies.
    """
    for leaf in leaves:
        leaf.grad = None
    with reentrant_checkpoints():
        found = torch.autograd.grad(outputs, leaves, arriving, retain_graph=retain_graph, allow_unused=True)
    result: list[Tensor | None] = []
    for leaf, through in zip(leaves, found, strict=True):
        parts = [dense(part.detach()) for part in (through, leaf.grad) if part is not None]
        leaf.grad = None
        result.append(sum(parts[1:], parts[0]) if parts else None)
    return result


@contextlib.contextmanager
def reentrant_checkpoints() -> Iterator[None]:
    """While open, torch's reentrant checkpoint runs under torch.autograd.grad, which it refuses because `.grad` would
    miss what it brings."""
    name = "_is_checkpoint_valid"
    original = getattr(torch.autograd, name, None)
    if original is None:
        yield
        return
    setattr(torch.autograd, name, lambda: True)
    try:
        yield
    finally:
        setattr(torch.autograd, name, original)
