"""Losses that an autograd function attaches to activations: they are no summand of the backward root.

A router's balance loss is often brought into backward where it is computed (Megatron's MoEAuxLossAutoScaler,
DeepSeek's AddAuxiliaryLoss): the function gives the activations back as they are and hands its own number to the
scalar. What arrives at that scalar is the term's weight.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from gradcheck_dist.probes.losses.loss_graph import FACTORS, edges_of, name_of
from gradcheck_dist.probes.losses.loss_terms import MAX_TERMS, emit_term
from gradcheck_dist.probes.recording.recorder import Recorder, guarded


def scalars_of(args: tuple[Any, ...], results: Any) -> list[Tensor]:
    """The computed scalars among a function's arguments, where it gives activations back and no scalar: one that hands
    a loss on with the activations (DDP's sink) attaches nothing. Runs behind every function: kept short."""
    scalars = [
        arg
        for arg in args
        if isinstance(arg, Tensor) and arg.grad_fn is not None and arg.numel() == 1 and arg.is_floating_point()
    ]
    if not scalars:
        return []
    given = [one for one in (results if isinstance(results, tuple) else (results,)) if isinstance(one, Tensor)]
    return scalars if given and all(one.numel() > 1 for one in given) else []


def watch_attached(name: str, recorder: Recorder, scalars: list[Tensor]) -> None:
    """Record what arrives at these scalars, behind all constants that multiply them, when a pass comes by."""
    for scalar in scalars:
        node: Any
        node, output = scalar.grad_fn, scalar.output_nr
        while name_of(node) in FACTORS and len(edges := edges_of(node)) == 1:
            ((node, output),) = edges
        node.register_prehook(functools.partial(_arrived, recorder, name, output))


@guarded("attached_terms")
def _arrived(recorder: Recorder, name: str, output: int, grads: tuple[Tensor | None, ...]) -> None:
    grad = grads[output]
    current = recorder.current
    if grad is None or current is None or not recorder.recording or current.num_attached >= MAX_TERMS:
        return
    current.num_attached += 1
    emit_term(recorder, current, grad, name, MAX_TERMS + current.num_attached, attached=True)
