"""Whether an optimizer's step moves parameters at all.

One that adds up what it reads and moves parameters only every so many calls (optimi's optimizer accumulation, Opacus'
virtual steps, hivemind) makes one step out of several: which of them belong together, only it knows. One that moves
them in two steps in a row does not: where it moved nothing before, it began its state (SOAP takes its first bases so).

Optimizers change parameters in place, and autograd counts that. Where it never counts one (updates through `.data`, or
in kernels of their own), the element with the largest gradient of a few parameters tells.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gradcheck_dist.events import KEPT_BY_OPTIMIZER, MOVED_NOTHING, MOVES_NOW, ProbeStatus
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.deferred import stacked
from gradcheck_dist.probes.recording.recorder import Recorder, guarded

MAX_PARAMS, MAX_VALUES = 4, 1 << 16
"""Whose values are looked at, and among how many of each."""
FINE = (torch.float32, torch.float64)
"""What a small update does not leave as it was by rounding."""
NEVER = -2

Versions = list[tuple[Tensor, int]]
Noted = tuple[Tensor, Tensor, Tensor, Tensor]
"""A parameter, where its gradient is largest, its value there, and whether that gradient is a number but zero."""


class Updates:
    """What is known of each optimizer's updates. `_counts`: whether autograd was seen to count them."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._told: dict[int, int] = {}  # optimizers that moved nothing once; the step before, where they did
        self._asked: set[int] = set()  # optimizers of which an accelerator tells later
        self._settled: set[int] = set()  # those of them that moved in the step after it, too
        self._begun: tuple[Optimizer, Versions, list[Noted]] | None = None

    def begin(self, optimizer: Optimizer) -> None:
        self._begun = None
        groups = optimizer.param_groups
        skips = getattr(optimizer, "found_inf", None) is not None  # a GradScaler's fused step may skip
        if skips or id(optimizer) in self._settled or any(_is_zero(group.get("lr")) for group in groups):
            return
        read = [param for group in groups for param in group["params"] if param.grad is not None]
        noted = [] if self._counts.get(optimizer) else list(_largest(read[:MAX_PARAMS]))
        self._begun = (optimizer, _versions(read), noted) if read else None

    def end(self, recorder: Recorder, optimizer: Optimizer) -> None:
        begun, self._begun = self._begun, None
        if begun is None or begun[0] is not optimizer:
            return
        _, versions, noted = begun
        counted = bool(self._counts.get(optimizer))
        moves = any(param._version != version for param, version in versions)
        self._counts[optimizer] = moves or counted
        key = id(optimizer)
        if moves and key not in self._told and key not in self._asked:
            return
        looked: bool | Tensor = False
        same: bool | Tensor = False
        if noted and not (moves or counted):
            tells = stacked([is_some for _, _, _, is_some in noted])
            kept = stacked([param.detach().reshape(-1).take(place) == was for param, place, was, _ in noted])
            looked, same = tells.any(), tells.any() & (kept | ~tells).all()
            if not is_host(looked):
                self._asked.add(key)
        elif key in self._asked:  # an answer of an earlier step may still be on its way
            looked = same = torch.zeros((), dtype=torch.bool, device=versions[0][0].device)
        told = functools.partial(self._tell, key, type(optimizer).__name__, moves, counted)
        recorder.emit(told, looked=looked, same=same)

    def _tell(
        self, key: int, name: str, moves: bool, counted: bool, *, looked: bool, same: bool, **fields: Any
    ) -> ProbeStatus:
        """What is new of an optimizer, or that its probe is in place. `looked`: at the values of its parameters, which
        stayed the `same`; on an accelerator that is known when it has come."""
        moved, before, step = moves or (looked and not same), self._told.get(key), fields["step"]
        if before is None and not moves and (counted or same):
            self._told[key] = NEVER
            return ProbeStatus(probe=KEPT_BY_OPTIMIZER, active=False, reason=f"{name} {MOVED_NOTHING}", **fields)
        if before is not None:
            self._told[key] = step if moved else NEVER
            if moved and before == step - 1:
                self._settled.add(key)
                return ProbeStatus(probe=KEPT_BY_OPTIMIZER, active=True, reason=f"{name} {MOVES_NOW}", **fields)
        return ProbeStatus(probe="optimizer", active=True, **fields)


def _is_zero(rate: object) -> bool:
    """Whether a learning rate is 0, or lies where nobody looks."""
    return bool(rate == 0) if isinstance(rate, int | float) else isinstance(rate, Tensor)


def _versions(params: list[Tensor]) -> Versions:
    """How often what this rank holds of each was changed in place."""
    held = [param if type(param) is Parameter else getattr(param, "_local_tensor", param) for param in params]
    return [(param, param._version) for param in held]


def _largest(params: list[Tensor]) -> Iterator[Noted]:
    """Of a long gradient, the largest of its first elements."""
    for param in params:
        grad = param.grad
        if type(param.data) is not Tensor or type(grad) is not Tensor or param.dtype not in FINE:
            continue
        if grad.layout is torch.strided and grad.shape == param.shape and grad.device == param.device and grad.numel():
            size, place = grad.flatten()[:MAX_VALUES].abs().max(dim=0)
            yield param, place, param.detach().reshape(-1).take(place), (size > 0) & size.isfinite()


@guarded(KEPT_BY_OPTIMIZER)
def updates_begin(recorder: Recorder, updates: Updates, optimizer: Optimizer) -> None:
    if recorder.sampling and recorder.trained:
        updates.begin(optimizer)


@guarded(KEPT_BY_OPTIMIZER)
def updates_end(recorder: Recorder, updates: Updates, optimizer: Optimizer) -> None:
    updates.end(recorder, optimizer)
