"""Whose gradients optimizers read, and what of these is still there when the next step begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradcheck_dist.events import BEFORE
from gradcheck_dist.probes.parameters.regions import main_grad_of
from gradcheck_dist.probes.parameters.registry import ParamInfo, originals
from gradcheck_dist.probes.recording.read_before import ReadBefore
from gradcheck_dist.probes.recording.samples import Sampler


class ReadGradients:
    """Whose gradients optimizers read. What nobody empties afterwards is there when the next step begins, and may still
    be there some steps later, where the optimizer that reads it comes in turn with another one."""

    def __init__(self) -> None:
        self._step = -1
        self._read: list[list[ParamInfo]] = []
        self._ids: set[int] = set()
        self._kept: tuple[int, dict[int, ParamInfo]] = (-1, {})
        self._emptied: set[int] = set()
        self.before = ReadBefore()

    def note(self, step: int, infos: list[ParamInfo]) -> None:
        """An optimizer reads the gradients of these parameters."""
        if self._step != step:
            self._read, self._ids, self._step = [], set(), step
        self._read.append(infos)
        self._ids.update([info.id for info in infos])
        if self._emptied:
            self._emptied -= self._ids

    def recall(self, step: int, of_id: Callable[[int], ParamInfo | None]) -> list[tuple[ParamInfo, Tensor]]:
        """Note that optimizers have stepped in `step`, if nothing but `before` is kept of it. What may be left of that
        step, each with whether it still is what was read."""
        found = self.before.take(step, of_id)
        if found:
            self.note(step, [])
            self._ids.update([info.id for info, _ in found])
        return [(info, is_still) for info, is_still in found if is_still is not None]

    def in_step(self, step: int) -> set[int]:
        """The ids of the parameters whose gradients were read in this step."""
        return self._ids if self._step == step else set()

    def emptied(self, infos: list[ParamInfo]) -> None:
        """The gradients of these parameters are emptied."""
        ids = [info.id for info in infos]
        self._emptied.update(ids)
        for key in ids if self._kept[1] else ():
            self._kept[1].pop(key, None)

    @property
    def num_emptied(self) -> int:
        return len(self._emptied)

    def are_emptied(self, ids: Iterable[int]) -> bool:
        """Whether all of these were read by an optimizer, and emptied since."""
        return self._ids.issuperset(ids) and self._emptied.issuperset(ids)

    def left(self, step: int, known: Callable[[], list[ParamInfo]]) -> list[ParamInfo]:
        """Those that were read until `step` and still have that gradient, in the model's order, without optimizers' own
        copies; where optimizers read such (shards, float32 copies), all `known` parameters with a gradient, of which
        they may be made. To be asked once a step, when the next one begins."""
        since, kept = self._kept
        left = dict(kept) if since == step else {}
        if self._step == step:
            read = [info for infos in self._read for info in infos]
            left |= {info.id: info for info in read if info.id < 0 or info.param.grad is not None}
        of_copies = any(key < 0 for key in left)
        left = {key: info for key, info in left.items() if key >= 0 and info.param.grad is not None}
        # On an accelerator nobody waits to see whether a gradient was filled with zeros by hand.
        self._kept = step + 1, {key: info for key, info in left.items() if _is_there(info.param.grad)}
        if of_copies:
            left |= {one.id: one for one in known() if one.id not in left and _is_there(one.param.grad)}
        return [left[key] for key in sorted(left)]

    def in_buffers(self, step: int) -> list[tuple[ParamInfo, Tensor]]:
        """Buffers of parameters that were read in `step` which still hold something, though `.grad` is empty."""
        read = [info for infos in self._read if self._step == step for info in infos]
        of_model = [one for info in read for one in (originals(info) if info.regions else (info,))]
        may = {one.id: one for one in of_model if "main_grad" in vars(one.param)}
        held = [(one, main_grad_of(one)) for _, one in sorted(may.items()) if one.param.grad is None]
        return [(info, kept) for info, kept in held if kept is not None and (not kept.is_cpu or _is_there(kept))]


def _is_there(grad: Tensor | None) -> bool:
    return grad is not None and grad.device.type == "cpu" and grad.layout is torch.strided and bool(grad.any())


def sample_left(
    recorder: Sampler, read: ReadGradients, seq: int, step: int, before: list[tuple[ParamInfo, Tensor]]
) -> None:
    """Sample what optimizers read until `step` and nobody emptied since, in front of the pass `seq`. `before`: what
    `read` has recalled."""
    if not recorder.sampling:
        return
    left = read.left(step, recorder.registry.infos)
    if left:
        recorder.sample_grads(seq, BEFORE, left)
    for info, is_still in before:
        recorder.sample_if(seq, BEFORE, info, is_still)
    for info, kept in read.in_buffers(step):
        recorder.sample(seq, BEFORE, info, kept)
