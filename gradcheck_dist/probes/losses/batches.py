"""Which batch a pass evaluated whose loss has no labels: checksums of what its first module was given, and of targets.

They tell passes that evaluate one batch again from passes of another batch, whose gradients are lost where they are
emptied before the optimizer comes. Where parameters were moved in between (sharpness-aware training), what a pass was
given does not tell: its closure may draw noise anew.

What finds parameters in a first step sees what modules are given. Later the module that is called next is waited for,
where losses have no labels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.losses.loss_graph import MAX_NODES, MODEL, name_of, operands_of, saved
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain
from gradcheck_dist.probes.recording import module_calls
from gradcheck_dist.probes.recording.marks import subtracted
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded, kept_away
from gradcheck_dist.stats import memory

MAX_TENSORS, MAX_ELEMENTS = 8, 1 << 20
"""That a module was given, and of each: enough to tell batches apart."""
MAX_DEPTH = 3
MAX_PARAMS, MAX_VALUES = 8, 4
"""Whose values are looked at, and how many of each."""


class Batches:
    """What the first module was given that was called since the last pass."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waits = True
        self._given: int | None = None
        self._asks = False
        self._step = -1
        self._values: list[Any] = []  # of some parameters, when the last pass of that step began
        self._listening: Callable[[], None] | None = None

    def called(self, given: Sequence[Any]) -> None:
        """A module is called with gradients enabled."""
        if self._waits and self._recorder.current is None:
            self._waits = False
            self._given = checksum(given)

    def begins(self, current: BackwardPass) -> None:
        """A backward pass begins."""
        self._rest()
        given, self._given = self._given, None
        if given is not None:
            before, step = self._values, self._step
            self._values, self._step = _some_values(self._recorder), self._recorder.step
            current.inputs = given if step != self._step or before == self._values else None

    def ends(self, current: BackwardPass) -> None:
        """A backward pass is over."""
        self._waits, self._given = True, None
        self._asks |= current.targets is not None or current.soft
        if self._asks and self._recorder.samples_upcoming and self._listening is None and module_calls.is_free():
            self._listening = module_calls.listen(kept_away(self._recorder, "unseen", self._on_call))

    def stop(self) -> None:
        self._asks = False
        self._rest()

    def _on_call(self, _: nn.Module, given: Sequence[Any]) -> None:
        if torch.is_grad_enabled() and torch._C._get_tracing_state() is None:
            self._rest()
            note(self._recorder, self, given)

    def _rest(self) -> None:
        if self._listening is not None:
            self._listening()
            self._listening = None


def install(recorder: Recorder, patches: Patches) -> None:
    batches = Batches(recorder)

    def call(recorder: Recorder, _: nn.Module, given: Sequence[Any]) -> None:
        note(recorder, batches, given)

    def begin(_: Recorder, current: BackwardPass, *__: Any) -> None:
        batches.begins(current)

    def end(_: Recorder, current: BackwardPass) -> None:
        batches.ends(current)

    autograd.CALL_LISTENERS.append(call)
    patches.on_restore(lambda: autograd.CALL_LISTENERS.remove(call))
    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    autograd.CLOSE_LISTENERS.append(end)
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(end))
    patches.on_restore(batches.stop)


@guarded("unseen")
def note(recorder: Recorder, batches: Batches, given: Sequence[Any]) -> None:
    if recorder.samples_upcoming:
        batches.called(given)


def checksum(given: Sequence[Any]) -> int | None:
    """Of all tensors among what was given; None where there are none, or some lie where nobody looks."""
    found = list(_tensors(given))
    if not 0 < len(found) <= MAX_TENSORS or not all(is_plain(one) and is_host(one) for one in found):
        return None
    try:
        return zlib.crc32(repr([(one.shape, zlib.crc32(_bytes(one))) for one in found]).encode())
    except (RuntimeError, TypeError):  # a type whose bytes nobody reads
        return None


def _bytes(tensor: Tensor) -> memoryview:
    """Those of a tensor's first elements."""
    rows = tensor.detach()
    if rows.numel() > MAX_ELEMENTS:
        rows = rows[: max(len(rows) * MAX_ELEMENTS // rows.numel(), 1)]
    return memory.flat(rows.contiguous().view(-1).view(torch.uint8)).data


def _tensors(given: Any, depth: int = MAX_DEPTH) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif depth and isinstance(given, list | tuple):
        for one in given:
            yield from _tensors(one, depth - 1)
    elif depth and isinstance(given, dict):
        yield from _tensors([*given.values()], depth)


def targets_of(losses: Sequence[Any], root: Any) -> int | None:
    """The same of the targets that torch's own losses were given, by their nodes, or of what is compared with what a
    root was computed from; None where some are not known."""
    found = [_target(node) for node in losses] or _subtracted(root)
    return checksum(found) if found and all(isinstance(one, Tensor) for one in found) else None


def _target(node: Any) -> Any:
    return saved(node, "_saved_targets" if name_of(node) == "CtcLossBackward" else "_saved_target")


def _subtracted(root: Any) -> list[Tensor]:
    """What the nodes between a root and the layers of its model subtract, the nearest first."""
    found: list[Tensor] = []
    todo = [root]
    for node in todo:
        one = subtracted(node)
        if one is not None:
            found.append(one)
        elif name_of(node) not in MODEL:
            todo += [below for below in operands_of(node) if below not in todo][: MAX_NODES - len(todo)]
    return found


def _some_values(recorder: Recorder) -> list[Any]:
    """What tells whether parameters were moved: how often autograd saw it, and some of their values."""
    trained = [info.param for info in recorder.registry.infos() if info.param.requires_grad]
    some = trained[:: max(1, len(trained) // MAX_PARAMS)][:MAX_PARAMS]
    held = [getattr(param, "_local_tensor", param) for param in some]
    plain = [one for one in held if is_plain(one) and is_host(one) and one.untyped_storage().size()]
    rows = [one.detach()[(0,) * (one.dim() - 1)] if one.dim() > 1 and one.numel() else one.detach() for one in plain]
    return [(one._version, row.reshape(-1)[:MAX_VALUES].tolist()) for one, row in zip(plain, rows, strict=True)]
