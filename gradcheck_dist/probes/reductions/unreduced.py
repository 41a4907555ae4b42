"""Whether an optimizer moves parameters alike on all ranks though nobody reduced their gradients before it reads them,
beside others that were reduced: it may combine something else in its step (momentum, signs, updates), or a line may
average what it left.

Of these parameters a few values are taken as an optimizer begins a step and when that is over, in each recorded step.
Where everything is reduced, nothing is looked at.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcheck_dist.events import ParamUpdate
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.dynamo import untraced
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.world import several_ranks
from gradcheck_dist.probes.reductions.copies import local_part, some_positions

MAX_PARAMS = 64
"""Of an optimizer's, evenly spread."""

Begun = tuple[int, list[ParamInfo], list[Tensor]]
"""The step, what is looked at, and its values."""


class Unreduced:
    """The values with which optimizers' steps began that are under way."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._first: int | None = None
        self._begun: dict[int, Begun] = {}

    def begins(self, optimizer: Optimizer) -> None:
        self._begun.pop(id(optimizer), None)
        if not self.recorder.sampling or not several_ranks():
            return
        step = self.recorder.step
        self._first = step if self._first is None else self._first
        if self.recorder.reduced_in < 0 and step != self._first:
            return  # in the first one others may be reduced behind it
        infos = [
            info
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
            and (info := self.recorder.registry.find(param)) is not None
            and info.reduced_in != step
            and local_part(info) is not None
        ]
        infos = infos[:: max(1, -(-len(infos) // MAX_PARAMS))]
        if infos and len({info.param.device for info in infos}) == 1:
            self._begun[id(optimizer)] = step, infos, _values(infos)

    def is_over(self, optimizer: Optimizer) -> None:
        step, infos, begun = self._begun.pop(id(optimizer), (0, [], []))
        if not infos or any(local_part(info) is None for info in infos):
            return
        recorder = self.recorder
        event = functools.partial(
            ParamUpdate,
            seq=recorder.next_seq(),
            t_ns=time.time_ns(),
            step=step,
            params=tuple(info.id for info in infos),
            counts=tuple(map(len, begun)),
        )
        values = torch.cat([*begun, *_values(infos)])
        recorder.copies.bring(values, functools.partial(_write, recorder, event))


def _values(infos: list[ParamInfo]) -> list[Tensor]:
    held = [local for info in infos if (local := local_part(info)) is not None]
    return [local.take(some_positions(local)).float() for local in held]


def _write(recorder: Recorder, event: Any, host: Tensor) -> None:
    recorder.writer.append(event(values=host.contiguous().numpy().tobytes()))


def install(recorder: Recorder, patches: Patches) -> None:
    unreduced = Unreduced(recorder)

    def before(optimizer: Optimizer, *_: Any) -> None:
        begins(recorder, unreduced, optimizer)

    def after(optimizer: Optimizer, *_: Any) -> None:
        over(recorder, unreduced, optimizer)

    patches.on_restore(register_optimizer_step_pre_hook(untraced(before)).remove)
    patches.on_restore(register_optimizer_step_post_hook(untraced(after)).remove)


@guarded("unreduced")
def begins(recorder: Recorder, unreduced: Unreduced, optimizer: Optimizer) -> None:
    unreduced.begins(optimizer)


@guarded("unreduced")
def over(recorder: Recorder, unreduced: Unreduced, optimizer: Optimizer) -> None:
    unreduced.is_over(optimizer)
