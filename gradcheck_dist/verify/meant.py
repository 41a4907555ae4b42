"""A gradient that is not the derivative may be what was asked for: what else would make it right is tried.

A stop-gradient that is written (BYOL's target, a straight-through estimator, a detached weight), a function that turns
the gradient's sign (domain-adversarial training), a backward that clips what arrives. Between ranks: a gradient that is
that of the own loss, while other ranks' losses depend on the same variables.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from gradcheck_dist.verify.attached import nodes_behind
from gradcheck_dist.verify.function import Function
from gradcheck_dist.verify.pieces import is_distributed, local
from gradcheck_dist.verify.result import BENT, DIFFERENTIATES, LOSS, Result
from gradcheck_dist.verify.stops import RECEIVED, WRITTEN, Stops
from gradcheck_dist.verify.targets import Target

if TYPE_CHECKING:
    from gradcheck_dist.verify.measure import Measured

LINEAR = 1e-3
"""Twice as much arriving must give twice as much within this share, else backward is a function of what arrives."""


def explained(measured: Measured, target: Target, wrong: Result) -> Result:
    """A wrong result, with what makes it right where anything does. All ranks of the module's exchange come here."""
    site = _own_loss_alone(measured, target)
    if site is not None:
        reason = wrong.reason or (LOSS if measured.scalar else "")
        return replace(wrong, shape="apart", factor=None, site=site, reason=reason)
    stops, held = _held(measured, target, wrong) if wrong.shape != "constant" else (None, False)
    if stops is not None and not held:
        return replace(wrong, outcome="undetermined", shape="", factor=None, reason=DIFFERENTIATES)
    if stops is not None:
        kind = RECEIVED if RECEIVED in stops.found else WRITTEN
        line = stops.found.get(kind)
        reason = f"{kind} at {PurePath(line.file).name}:{line.line}" if line is not None else kind
        return replace(wrong, shape="cut" if wrong.shape == "cut" else "stopped", reason=reason)
    function = measured.function.module_call
    if not isinstance(function, Function):
        return wrong
    if _is_bent(measured, function, target):
        return replace(wrong, outcome="undetermined", shape="", factor=None, reason=BENT)
    if _is_reversed(measured, function, target):
        wrong = replace(wrong, shape="reversed")
    return _named(measured, function, target, wrong)


def _named(measured: Measured, function: Function, target: Target, wrong: Result) -> Result:
    """With the functions inside whose backward is not the derivative; where they make all of the difference, what is
    off is what they do."""
    found = measured.functions
    if found is None or measured.function is not function or not measured.exchange.alone:
        return wrong
    named = tuple({one.key: one for one in (applied.named() for applied in found.wrong)}.values())
    if not named:
        return wrong
    function.within = found.held
    try:
        right = measured.agrees(target, "at their word")
    finally:
        function.within = None
    return replace(wrong, functions=named, at_their_word=right)


def _own_loss_alone(measured: Measured, target: Target) -> Any:
    """Where the ranks communicate, when each rank's gradient is the derivative of its own share alone."""
    ranks = measured.exchange.ranks
    if len(ranks) < 2 or not measured.held_once:
        return None
    alone = [measured.agrees(target, f"alone {rank}", only=rank) for rank in ranks[:2]]
    return measured.site if all(alone) else None


def _held(measured: Measured, target: Target, wrong: Result) -> tuple[Stops | None, bool]:
    """The written stop-gradients that, held fixed, leave the gradient right; not, but perhaps so, where forward
    differentiates, too."""
    stops, function = Stops(), measured.function.module_call
    try:
        function.within = stops.recording
        measured.function.value({})
        function.within = stops.held
        right = measured.agrees(target, "held")
    finally:
        function.within = None
    found = any(measured.exchange.gather(f"{function.path}/{target.label}/stops", bool(stops.found)))
    where = f"{function.path}/{target.label}/differentiates"
    own = any(measured.exchange.gather(where, stops.differentiates))
    held = right or wrong.shape == "cut"
    return (stops, held) if found and (held or own) else (None, False)


def _is_bent(measured: Measured, function: Function, target: Target) -> bool:
    """Whether backward is no linear function of what arrives: it clips, or scales by the gradient itself."""
    added, once, twice = (function.differentiated(scale)[1] for scale in (0.0, 1.0, 2.0))
    bent = False
    for key in target.keys:
        zero, one, two = added[key], once[key], twice[key]
        if one is not None and two is not None:
            rest = zero if zero is not None else torch.zeros_like(one)
            off = local(two - rest - 2 * (one - rest))
            bent |= float(off.norm()) > LINEAR * float(local(one).norm())
    return any(measured.exchange.gather(f"{function.path}/{target.label}/bent", bent))


def _is_reversed(measured: Measured, function: Function, target: Target) -> bool:
    """Whether the gradient is right when functions that turn its sign hand it on as it is."""
    turned: list[bool] = []

    def watch(outputs: list[Tensor]) -> None:
        for node in nodes_behind(outputs):
            if isinstance(node, BackwardCFunction):
                node.register_hook(lambda given, arrived: _straight(given, arrived, turned))  # type: ignore[attr-defined]

    _, gradient = function.differentiated(1.0, watch=watch)
    where = f"{function.path}/{target.label}/turned"
    return any(measured.exchange.gather(where, bool(turned))) and measured.agrees(target, "reversed", gradient)


def _straight(given: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...], turned: list[bool]) -> Any:
    """What arrived, in place of a negative multiple of it."""
    single = [grad for grad in arrived if grad is not None]
    if len(single) != 1 or is_distributed(single[0]):
        return None
    whole = single[0]
    result = list(given)
    for index, grad in enumerate(given):
        if grad is not None and grad.shape == whole.shape and not (grad.is_complex() or is_distributed(grad)):
            factor = float((grad * whole).sum() / whole.square().sum())
            if factor < 0 and float((grad - factor * whole).norm()) <= LINEAR * float(grad.norm()):
                result[index] = whole.clone()
                turned.append(True)
    return tuple(result)
