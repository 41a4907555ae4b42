"""What is subtracted from a computed tensor, or compared with it: targets, or one number.

The autograd graph does not tell: subtracting keeps nothing. Whoever pushes a result towards one number adds up such
losses by design (a discriminator's, on real, generated and mismatched data), so a difference from one is marked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradcheck_dist.probes.losses.loss_graph import MAX_FACTORS, MODEL, edges_of, name_of
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain
from gradcheck_dist.probes.recording.marks import from_one_number, mark_from_one_number, mark_subtracted
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded

_OF_DISTANCES = {"MeanBackward", "SumBackward", "AbsBackward"}


def install(recorder: Recorder, patches: Patches) -> None:
    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def subtract(self: Tensor, other: Any) -> Any:
            made = original(self, other)
            watched = recorder.records_upcoming and not torch.compiler.is_compiling()
            if watched and type(made) is Tensor and made.requires_grad and not _computed_both(self, other):
                note(recorder, made.grad_fn, made.numel(), self, other)
            return made

        return subtract

    def watch_distance(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def l1_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
            made = original(input, target, *args, **kwargs)
            watched = recorder.records_upcoming and not torch.compiler.is_compiling()
            if watched and type(made) is Tensor and made.requires_grad and not _computed_both(input, target):
                note(recorder, _difference(made.grad_fn), max(input.numel(), target.numel()), input, target)
            return made

        return l1_loss

    def watch_angle(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def cosine_similarity(x1: Tensor, x2: Tensor, *args: Any, **kwargs: Any) -> Any:
            made = original(x1, x2, *args, **kwargs)
            watched = recorder.samples_upcoming and not torch.compiler.is_compiling()
            if watched and type(made) is Tensor and made.requires_grad and not _computed_both(x1, x2):
                compared(recorder, made.grad_fn, x2 if x1.requires_grad else x1)
            return made

        return cosine_similarity

    patches.replace(Tensor, "__sub__", watch)
    patches.replace(functional, "l1_loss", watch_distance)
    patches.replace(functional, "cosine_similarity", watch_angle)


def _difference(node: Any) -> Any:
    """The node that subtracts, behind what torch makes of a difference inside of its own loss; None for none."""
    while node is not None and name_of(node) != "SubBackward":
        node = node.next_functions[0][0] if name_of(node) in _OF_DISTANCES else None
    return node


def _computed_both(minuend: Tensor, subtrahend: Any) -> bool:
    return minuend.requires_grad and isinstance(subtrahend, Tensor) and subtrahend.requires_grad


@guarded("differences")
def note(recorder: Recorder, node: Any, num: int, minuend: Tensor, subtrahend: Any) -> None:
    """Mark a difference of `num` elements from one number, by the node that made it. One element may be a sample with
    its target."""
    if recorder.suspended or num < 2 or node is None:
        return
    if not isinstance(subtrahend, Tensor):
        mark_from_one_number(node, True)
        return
    known = subtrahend if minuend.requires_grad else minuend
    if is_plain(known):
        mark_from_one_number(node, _is_one_number(known))
        if recorder.samples_upcoming and is_host(known):
            mark_subtracted(node, known)


@guarded("differences")
def compared(recorder: Recorder, node: Any, known: Tensor) -> None:
    """Mark what a computed tensor is compared with otherwise than by a difference."""
    if not recorder.suspended and is_plain(known) and is_host(known):
        mark_subtracted(node, known)


def _is_one_number(known: Tensor) -> bool | Tensor:
    """Whether all elements are alike. Most targets differ in those two that are looked at first."""
    first, last = (known[(place,) * known.dim()] for place in (0, -1))
    if is_host(known) and bool(first != last):
        return False
    alike = (known == first).all()
    return bool(alike) if is_host(alike) else alike


def to_one_number(body: Any) -> bool | Tensor:
    """Whether a distance's elements are differences from one number, or none: a bool, or 0-d on its device. What comes
    out of somebody else's function may be a difference from targets."""
    node = body
    for _ in range(MAX_FACTORS):
        operands = edges_of(node)
        if name_of(node) == "SubBackward":
            return from_one_number(node)
        if name_of(node) == "RsubBackward" and len(node.next_functions) == 1:
            return True
        if name_of(node) in MODEL:
            return True
        if len(operands) != 1:
            return name_of(node) == "AddBackward"
        node = operands[0][0]
    return False
