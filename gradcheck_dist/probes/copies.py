"""Whether ranks hold copies of one parameter: a few values of each, in the step in which it is first seen.

Tensors of one name and one shape may be copies, and share one gradient, or shards and experts, and share none. Their
gradients do not tell which, their values do. They are read when a backward pass begins, when whatever is broadcast,
loaded or made lazily is in place, and again when an optimizer has stepped, for values may be moved apart during a step
on purpose (a perturbation that is taken back).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcheck_dist.events import ParamValues
from gradcheck_dist.probes import autograd
from gradcheck_dist.probes.patching import Patches
from gradcheck_dist.probes.recorder import Recorder, guarded
from gradcheck_dist.probes.registry import ParamInfo
from gradcheck_dist.probes.world import several_ranks
from gradcheck_dist.stats.sampling import sample_positions

NUM_VALUES = 16
"""Of each parameter."""


class Copies:
    """Which parameters were looked at."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._step = -1
        self._new: list[ParamInfo] = []
        self._num_known = 0

    def begins(self) -> None:
        """A backward pass begins: look at the parameters that are new."""
        recorder = self.recorder
        if not recorder.sampling or not several_ranks():
            return
        if self._step != recorder.step:
            self._step, self._new = recorder.step, []
        infos = recorder.registry.infos()
        if len(infos) > self._num_known:
            new, self._num_known = infos[self._num_known :], len(infos)
            found = [info for info in new if info.param.requires_grad and _local(info) is not None]
            self._new += found
            self._look(found, after=False)

    def is_over(self) -> None:
        """An optimizer has stepped."""
        if self._step == self.recorder.step and self._new:
            self._look(self._new, after=True)

    def _look(self, infos: list[ParamInfo], *, after: bool) -> None:
        held = [(info.id, local) for info in infos if (local := _local(info)) is not None]
        if not held or len({local.device for _, local in held}) > 1:
            return
        parts = [local.take(_positions(local)).float() for _, local in held]
        record = functools.partial(
            ParamValues, params=tuple(id for id, _ in held), counts=tuple(len(part) for part in parts), after=after
        )
        self.recorder.copies.bring(torch.cat(parts), functools.partial(self._write, record))

    def _write(self, record: Any, host: Tensor) -> None:
        self.recorder.writer.append(record(values=host.contiguous().numpy().tobytes()))


def install(recorder: Recorder, patches: Patches) -> None:
    copies = Copies(recorder)

    def begin(recorder: Recorder, *_: Any) -> None:
        begun(recorder, copies)

    def after(*_: Any) -> None:
        over(recorder, copies)

    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(register_optimizer_step_post_hook(after).remove)


@guarded("copies")
def begun(recorder: Recorder, copies: Copies) -> None:
    copies.begins()


@guarded("copies")
def over(recorder: Recorder, copies: Copies) -> None:
    copies.is_over()


def _local(info: ParamInfo) -> Tensor | None:
    """What this rank holds of a parameter; None where that is nothing, or not what it was when it was first seen (a
    tensor that is whole only while it is used)."""
    param = info.param
    local: Tensor = getattr(param, "_local_tensor", param).detach()
    if local.is_meta or not local.numel() or not local.is_floating_point() or not local.untyped_storage().size():
        return None
    return local if tuple(param.shape) == info.shape else None


def _positions(local: Tensor) -> Tensor:
    return torch.as_tensor(sample_positions("local", local.numel(), NUM_VALUES)).to(local.device)
