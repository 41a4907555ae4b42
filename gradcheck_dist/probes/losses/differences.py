"""What is subtracted from a computed tensor: targets, or one number.

The autograd graph does not tell: subtracting keeps nothing. Whoever pushes a result towards one number adds up such
losses by design (a discriminator's, on real, generated and mismatched data), so a difference from one is marked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.probes.losses.loss_graph import MAX_FACTORS, MODEL, edges_of, name_of
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain
from gradcheck_dist.probes.recording.marks import from_one_number, mark_from_one_number, mark_subtracted
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded


def install(recorder: Recorder, patches: Patches) -> None:
    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def subtract(self: Tensor, other: Any) -> Any:
            made = original(self, other)
            watched = recorder.records_upcoming and not torch.compiler.is_compiling()
            if watched and type(made) is Tensor and made.requires_grad and not _computed_both(self, other):
                note(recorder, made, self, other)
            return made

        return subtract

    patches.replace(Tensor, "__sub__", watch)


def _computed_both(minuend: Tensor, subtrahend: Any) -> bool:
    return minuend.requires_grad and isinstance(subtrahend, Tensor) and subtrahend.requires_grad


@guarded("differences")
def note(recorder: Recorder, made: Tensor, minuend: Tensor, subtrahend: Any) -> None:
    """Mark a difference of many elements from one number. One element may be a sample with its target."""
    if recorder.suspended or made.numel() < 2 or made.grad_fn is None:
        return
    if not isinstance(subtrahend, Tensor):
        mark_from_one_number(made, True)
        return
    known = subtrahend if minuend.requires_grad else minuend
    if is_plain(known):
        mark_from_one_number(made, _is_one_number(known))
        if recorder.samples_upcoming and is_host(known):
            mark_subtracted(made, known)


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
