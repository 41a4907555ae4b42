"""Whether ranks hold the same parameters: a checksum of a few values when a step begins and when it is over.

Ranks that reduce no gradient and are alike again after they were not have averaged their parameters: local SGD, DiLoCo,
post-local SGD. By which collective, and what of (the parameters, copies, the way they went), is theirs. It may come
long after the recorded steps: where several ranks have reduced nothing in the last of them (behind a warm-up, which
reduces gradients, too), this probe alone stays and looks on, a few small copies an optimizer step, until it has seen
parameters change that no optimizer changed.

What changes parameters behind the optimizer may be a line that looks at its own rank alone: a weight decay or a clip of
weights by hand. Values do not tell (both may scale what ranks differ by), so what collectives moved since the change
before is counted.

An optimizer that steps copies of its own (float32 beside bfloat16) changes no parameter itself. Where parameters are
found to hold what it left in its copies, it is the optimizer that changed them.

Who looks on also sees another model that is trained later: a reference on one process often comes first.
"""

from __future__ import annotations

import functools
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcheck_dist.events import LATER_MODELS, Replica
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.parameters.plans import ParamInfo
from gradcheck_dist.probes.recording.dynamo import untraced
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.world import several_ranks
from gradcheck_dist.wording import plural

MAX_PARAMS = 8
MAX_VALUES = 16
"""Of each of them."""
MAX_CHANGES = 8
"""After as many changes the probe has seen enough."""
MOVING = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
"""Methods of ProcessGroup, some of them older names."""
OBJECTS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip
"""Functions that move what was pickled: a rank's log has hundreds of bytes, as many as a tiny model has parameters."""
PACKED = 16
"""Whoever shares parameters may send as many times less: of signs, or of a part of them."""
NUMBERS = 64
"""Fewer elements than these are a loss or a count that ranks tell one another, where parameters have more."""


class Replicas:
    """The values that are looked at, and what is known of them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._chosen: list[tuple[ParamInfo, Tensor]] = []
        self._begun = -1
        self._later = 0
        self._left: int | None = None
        self._in_copies: int | None = None  # the same checksum of what an optimizer left in its own copies
        self.num_changes = 0
        self.moved = 0  # elements that collectives moved
        self.pickled = 0  # calls of functions that move objects, one inside of another
        self._moved_before = 0  # up to the last change
        self._left_values: Tensor | None = None
        self._stepped: set[int] = set()  # ids of parameters that optimizers stepped in recorded steps
        self._asked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # what steps behind recorded steps

    def watch(self, patches: Patches) -> None:
        """Count what collectives move."""

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def moving(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
                count(self.recorder, self, group, args)
                return original(group, *args, **kwargs)

            return moving

        for name in MOVING:
            if hasattr(dist.ProcessGroup, name):
                patches.replace(dist.ProcessGroup, name, counted)

        def of_objects(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def moving(*args: Any, **kwargs: Any) -> Any:
                self.pickled += 1
                try:
                    return original(*args, **kwargs)
                finally:
                    self.pickled -= 1

            return moving

        for name in OBJECTS:
            for module in (distributed_c10d, dist):
                if hasattr(module, name):
                    patches.replace(module, name, of_objects)

    def begins(self) -> None:
        """A backward pass begins: note the first of each step."""
        recorder = self.recorder
        if recorder.sampling and self._begun != recorder.step and several_ranks():
            self._begun = recorder.step
            self._note(after=False)

    def is_over(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """An optimizer has stepped: one of torch.optim's, or of the program's own."""
        if self.recorder.sampling and optimizer is not None:
            self._stepped.update(map(id, _params(optimizer)))
        if self.recorder.sampling and self._begun == self.recorder.step:
            self._note(after=True)

    def may_come_later(self) -> bool:
        """Whether an average of parameters may follow: several ranks, and no gradient was reduced between them in the
        last step."""
        return several_ranks() and self.recorder.reduced_in < self._begun and bool(self._chosen)

    def look_on(self, patches: Patches) -> None:
        """Stay behind the recorded steps, as the only probe."""

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            another(self.recorder, self, optimizer)
            if self.num_changes < MAX_CHANGES:
                look(self.recorder, self, False)

        def after(*_: Any) -> None:
            if self.num_changes < MAX_CHANGES:
                look(self.recorder, self, True)

        patches.on_restore(register_optimizer_step_pre_hook(untraced(before)).remove)
        patches.on_restore(register_optimizer_step_post_hook(untraced(after)).remove)
        if dist.is_available():
            self.watch(patches)

    def tell_another(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: of parameters that no recorded step stepped?"""
        if optimizer in self._asked:
            return
        self._asked.add(optimizer)
        params = _params(optimizer)
        if params and self._stepped and self._stepped.isdisjoint(map(id, params)):
            step = self._begun + 1 + self._later
            words = f"behind the recorded steps {type(optimizer).__name__} steps {plural(len(params), 'parameter')}"
            words += f" that none of these trained, first at step {step} (--steps {step}:{step + 3} records it)"
            self.recorder.status(LATER_MODELS, False, words)

    def look(self, after: bool) -> None:
        values = self._values(copies=after)
        if values is not None:
            self._later += after
            self.recorder.copies.bring(values, functools.partial(self._compare, after, self._later, self.moved))
            self.recorder.copies.poll()

    def _note(self, *, after: bool) -> None:
        values = self._values(copies=after)
        if values is not None:
            recorder = self.recorder
            event = functools.partial(Replica, t_ns=time.time_ns(), step=recorder.step, after=after)
            # One number is left free for what an optimizer left in its copies.
            noted = functools.partial(self._write, event, self.moved, recorder.next_seq(), recorder.next_seq())
            recorder.copies.bring(values, noted)

    def _write(self, event: Callable[..., Replica], moved: int, free: int, seq: int, host: Tensor) -> None:
        own, copied = _checksums(host)
        noted = event(seq=seq, fingerprint=own)
        if not noted.after:
            before = self._before(host[0])
            noted = event(seq=seq, fingerprint=own, exchanged=self._exchanged(host[0], moved), **before)
        if noted.after:
            self._left, self._in_copies = own, copied  # with these the first look behind the recorded steps compares
            self._left_values = host[0].clone()
        elif own == self._in_copies != self._left:
            left = Replica(seq=free, t_ns=noted.t_ns, step=noted.step - 1, fingerprint=own, after=True)
            self.recorder.writer.append(left)
        self.recorder.writer.append(noted)

    def _before(self, begun: Tensor) -> dict[str, Any]:
        """What an optimizer had left, and what a step begins with, for its event."""
        left = self._left_values
        if left is None or not len(left) == len(begun) == sum(len(which) for _, which in self._chosen):
            return {}
        return {
            "params": tuple(info.id for info, _ in self._chosen),
            "counts": tuple(len(which) for _, which in self._chosen),
            "values": torch.stack([left, begun]).float().numpy().tobytes(),
        }

    def _compare(self, after: bool, later: int, moved: int, host: Tensor) -> None:
        found, copied = _checksums(host)
        if after:
            self._left, self._in_copies, self._left_values = found, copied, host[0].clone()
        elif self._left is not None and found not in (self._left, self._in_copies):
            self.num_changes += 1
            recorder = self.recorder
            event = functools.partial(Replica, t_ns=time.time_ns(), step=self._begun, num_steps_later=later)
            recorder.writer.append(event(seq=recorder.next_seq(), fingerprint=self._left, after=True))
            exchanged = self._exchanged(host[0], moved)
            recorder.writer.append(event(seq=recorder.next_seq(), fingerprint=found, after=False, exchanged=exchanged))

    def _exchanged(self, found: Tensor, moved: int) -> bool | None:
        """Whether collectives moved so much since the last change that other ranks' parameters may have come; None
        where nothing changed."""
        if self._left_values is None:
            self._moved_before = moved
            return None
        taken = [len(which) for _, which in self._chosen]
        if not len(found) == len(self._left_values) == sum(taken) or torch.equal(found, self._left_values):
            return None
        changed = (found != self._left_values).split(taken)
        sizes = [info.numel for info, _ in self._chosen]
        num = sum(size for size, of in zip(sizes, changed, strict=True) if bool(of.any()))
        before, self._moved_before = self._moved_before, moved
        return moved - before >= max(num / PACKED, min(NUMBERS, sum(sizes)))

    def _values(self, *, copies: bool) -> Tensor | None:
        """Some values of some parameters, the same ones on ranks that hold the same parameters, in one row. They are
        chosen once: what other parameters have says nothing of a change. `copies`: what optimizers' copies hold of
        them follows in a second row, where there are any."""
        infos = self.recorder.registry.infos()
        if not self._chosen:
            plain = [info for info in infos if info.param.requires_grad and _is_whole(info.param)]
            plain.sort(key=lambda info: info.name)
            chosen = plain[:: max(1, len(plain) // MAX_PARAMS)][:MAX_PARAMS]
            self._chosen = [
                (info, torch.as_tensor(info.positions[:MAX_VALUES], device=info.param.device)) for info in chosen
            ]
        held = [(info, which) for info, which in self._chosen if _is_whole(info.param)]
        rows = [[info.param.detach().take(which) for info, which in held]]
        if copies and self.recorder.registry.copies():
            rows.append([self._copied(info, which) for info, which in held])
        if not held or len({part.device for row in rows for part in row}) > 1:
            return None
        return torch.stack([torch.cat([part.double() for part in row]) for row in rows])

    def _copied(self, info: ParamInfo, which: Tensor) -> Tensor:
        """What an optimizer's copy holds of these values, in the parameter's type; without a copy, its own."""
        first, last = min(info.positions[:MAX_VALUES]), max(info.positions[:MAX_VALUES])
        for copy in self.recorder.registry.copies():
            for region in copy.regions if _is_whole(copy.param) else ():
                if region.info is info and region.start <= first and last < region.start + region.length:
                    return copy.param.detach().take(which + (region.offset - region.start)).to(info.param.dtype)
        return info.param.detach().take(which)


def install(recorder: Recorder, patches: Patches) -> None:
    replicas = recorder.replicas = Replicas(recorder)

    def begin(recorder: Recorder, *_: Any) -> None:
        begun(recorder, replicas)

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        over(recorder, replicas, optimizer)

    if dist.is_available():
        replicas.watch(patches)
    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(register_optimizer_step_post_hook(untraced(after)).remove)


@guarded("replicas")
def begun(recorder: Recorder, replicas: Replicas) -> None:
    replicas.begins()


@guarded("replicas")
def over(recorder: Recorder, replicas: Replicas, optimizer: torch.optim.Optimizer) -> None:
    replicas.is_over(optimizer)


@guarded("replicas")
def another(recorder: Recorder, replicas: Replicas, optimizer: torch.optim.Optimizer) -> None:
    replicas.tell_another(optimizer)


@guarded("replicas")
def count(_: Recorder, replicas: Replicas, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
    """A collective is called with these arguments. Parameters that are pickled whole have more bytes than elements. One
    over a single rank moves nothing."""
    if group.size() < 2:
        return
    elements = sum(one.numel() for one in _tensors(args))
    replicas.moved += elements // PACKED if replicas.pickled else elements


@guarded("replicas")
def look(recorder: Recorder, replicas: Replicas, after: bool) -> None:
    replicas.look(after)


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer steps now."""
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def _tensors(args: Any) -> Iterator[Tensor]:
    for one in args:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _is_whole(param: Tensor) -> bool:
    """Whether a parameter's values lie here, as one plain tensor."""
    if hasattr(param, "_local_tensor") or param.is_meta or not param.numel() or not param.is_floating_point():
        return False
    return param.untyped_storage().size() > 0


def _checksums(host: Tensor) -> tuple[int, int | None]:
    """Of the parameters' values, and of those in copies."""
    found = [zlib.crc32(row.contiguous().numpy().tobytes()) for row in host]
    return found[0], found[1] if len(found) > 1 else None
