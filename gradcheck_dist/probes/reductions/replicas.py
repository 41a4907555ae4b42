"""Whether ranks hold the same parameters: a checksum of a few values when a step begins and when it is over.

Ranks that reduce no gradient and are alike again after they were not have averaged their parameters: local SGD, DiLoCo,
post-local SGD. By which collective, and what of (the parameters, copies, the way they went), is theirs. It may come
long after the recorded steps: where several ranks have reduced nothing by then, this probe alone stays and looks on,
a few small copies an optimizer step, until it has seen parameters change that no optimizer changed.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcheck_dist.events import Replica
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.recording.dynamo import untraced
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.world import several_ranks

MAX_PARAMS = 8
MAX_VALUES = 16
"""Of each of them."""
MAX_CHANGES = 8
"""After as many changes the probe has seen enough."""


class Replicas:
    """The values that are looked at, and what is known of them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._chosen: list[tuple[Tensor, Tensor]] = []
        self._begun = -1
        self._later = 0
        self._left: int | None = None
        self.num_changes = 0

    def begins(self) -> None:
        """A backward pass begins: note the first of each step."""
        recorder = self.recorder
        if recorder.sampling and self._begun != recorder.step and several_ranks():
            self._begun = recorder.step
            self._note(after=False)

    def is_over(self) -> None:
        """An optimizer has stepped."""
        if self.recorder.sampling and self._begun == self.recorder.step:
            self._note(after=True)

    def may_come_later(self) -> bool:
        """Whether an average of parameters may follow: several ranks, and no gradient was reduced between them."""
        return several_ranks() and not self.recorder.reduced and bool(self._chosen)

    def look_on(self, patches: Patches) -> None:
        """Stay behind the recorded steps, as the only probe."""

        def before(*_: Any) -> None:
            if self.num_changes < MAX_CHANGES:
                look(self.recorder, self, False)

        def after(*_: Any) -> None:
            if self.num_changes < MAX_CHANGES:
                look(self.recorder, self, True)

        patches.on_restore(register_optimizer_step_pre_hook(untraced(before)).remove)
        patches.on_restore(register_optimizer_step_post_hook(untraced(after)).remove)

    def look(self, after: bool) -> None:
        values = self._values()
        if values is not None:
            self._later += after
            self.recorder.copies.bring(values, functools.partial(self._compare, after, self._later))
            self.recorder.copies.poll()

    def _note(self, *, after: bool) -> None:
        values = self._values()
        if values is not None:
            recorder = self.recorder
            event = functools.partial(
                Replica, seq=recorder.next_seq(), t_ns=time.time_ns(), step=recorder.step, after=after
            )
            recorder.copies.bring(values, functools.partial(self._write, event))

    def _write(self, event: Callable[..., Replica], host: Tensor) -> None:
        noted = event(fingerprint=_checksum(host))
        if noted.after:
            self._left = noted.fingerprint  # with which the first look behind the recorded steps is compared
        self.recorder.writer.append(noted)

    def _compare(self, after: bool, later: int, host: Tensor) -> None:
        found = _checksum(host)
        if after:
            self._left = found
        elif self._left is not None and found != self._left:
            self.num_changes += 1
            recorder = self.recorder
            event = functools.partial(Replica, t_ns=time.time_ns(), step=self._begun, num_steps_later=later)
            recorder.writer.append(event(seq=recorder.next_seq(), fingerprint=self._left, after=True))
            recorder.writer.append(event(seq=recorder.next_seq(), fingerprint=found, after=False))

    def _values(self) -> Tensor | None:
        """Some values of some parameters, the same ones on ranks that hold the same parameters, as bytes. They are
        chosen once: what other parameters have says nothing of a change."""
        infos = self.recorder.registry.infos()
        if not self._chosen:
            plain = [info for info in infos if info.param.requires_grad and _is_whole(info.param)]
            plain.sort(key=lambda info: info.name)
            chosen = plain[:: max(1, len(plain) // MAX_PARAMS)][:MAX_PARAMS]
            self._chosen = [
                (info.param, torch.as_tensor(info.positions[:MAX_VALUES]).to(info.param.device)) for info in chosen
            ]
        parts = [param.detach().take(which) for param, which in self._chosen if _is_whole(param)]
        if not parts or len({part.device for part in parts}) > 1:
            return None
        return torch.cat([part.double() for part in parts]).view(torch.uint8)


def install(recorder: Recorder, patches: Patches) -> None:
    replicas = recorder.replicas = Replicas(recorder)

    def begin(recorder: Recorder, *_: Any) -> None:
        begun(recorder, replicas)

    def after(*_: Any) -> None:
        over(recorder, replicas)

    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(register_optimizer_step_post_hook(untraced(after)).remove)


@guarded("replicas")
def begun(recorder: Recorder, replicas: Replicas) -> None:
    replicas.begins()


@guarded("replicas")
def over(recorder: Recorder, replicas: Replicas) -> None:
    replicas.is_over()


@guarded("replicas")
def look(recorder: Recorder, replicas: Replicas, after: bool) -> None:
    replicas.look(after)


def _is_whole(param: Tensor) -> bool:
    """Whether a parameter's values lie here, as one plain tensor."""
    if hasattr(param, "_local_tensor") or param.is_meta or not param.numel() or not param.is_floating_point():
        return False
    return param.untyped_storage().size() > 0


def _checksum(host: Tensor) -> int:
    return zlib.crc32(host.contiguous().numpy().tobytes())
