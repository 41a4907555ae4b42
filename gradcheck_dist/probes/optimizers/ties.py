"""Whether modules that were made to share one parameter still share it when they are trained.

What replaces parameters module by module gives each of them a tensor of its own: torch's parallelize_module, to_empty
of what was made on the meta device, load_state_dict(assign=True). Nothing fails, and from then on each copy gets the
gradient of its own use alone.

Sources: torch/distributed/tensor/parallel/style.py (`module.register_parameter(name, dist_param)`); torch/nn/modules/
module.py, `_apply` and `_load_from_state_dict`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from gradcheck_dist.events import BrokenTie, Site
from gradcheck_dist.probes.parameters.plans import ParamInfo
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import OWN_DIRS, TORCH_DIR, caller_site

_SETTERS = {"register_parameter", "__setattr__"}


@dataclass(frozen=True)
class Slot:
    """A name under which a module holds a parameter. No parameter is referred to, not even weakly: torch refuses to
    swap what is (torch.utils.swap_tensors)."""

    module: weakref.ref[nn.Module]
    name: str

    def is_of(self, module: nn.Module, name: str) -> bool:
        return self.name == name and self.module() is module

    def held(self) -> Tensor | None:
        module = self.module()
        return None if module is None else module._parameters.get(self.name)


@dataclass
class Tie:
    """Slots that the program gave one parameter, and where torch gave one of them another."""

    slots: list[Slot]
    broken_at: Site | None = None


class Ties:
    """What was tied since the probes came."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first: dict[int, Slot] = {}  # by id of a parameter
        self._by_slot: dict[tuple[int, str], Tie] = {}  # by id of a module, and name

    def slot_of(self, param: Tensor) -> Slot | None:
        """Where a parameter was registered first, if it is still there."""
        slot = self._first.get(id(param))
        return slot if slot is not None and slot.held() is param else None

    def first_slot(self, param: Tensor) -> Slot | None:
        """Where what has this id was registered first, be it there or not: another tensor may have had that id."""
        return self._first.get(id(param))

    def registered(self, module: nn.Module, name: str, param: Tensor) -> None:
        """A module was given a parameter."""
        self._leave(module, name, param)
        first = self.slot_of(param)
        if first is None:
            self._first[id(param)] = Slot(weakref.ref(module), name)
        elif not first.is_of(module, name):
            self._tie(first, Slot(weakref.ref(module), name))

    def _leave(self, module: nn.Module, name: str, param: Tensor) -> None:
        """What a program itself sets is meant; torch replaces parameters and knows of no ties."""
        tie = self._tie_of(module, name)
        if tie is None or any(slot.held() is param for slot in tie.slots if not slot.is_of(module, name)):
            return
        if _is_by_torch():
            tie.broken_at = tie.broken_at or caller_site()
        else:
            tie.slots = [slot for slot in tie.slots if not slot.is_of(module, name)]
            del self._by_slot[id(module), name]

    def _tie_of(self, module: nn.Module, name: str) -> Tie | None:
        tie = self._by_slot.get((id(module), name))
        return tie if tie is not None and any(slot.is_of(module, name) for slot in tie.slots) else None

    def _tie(self, first: Slot, second: Slot) -> None:
        modules = [module for slot in (first, second) if (module := slot.module()) is not None]
        known = [self._tie_of(module, slot.name) for module, slot in zip(modules, (first, second), strict=True)]
        tie = next((tie for tie in known if tie is not None), Tie([]))
        for module, slot, before in zip(modules, (first, second), known, strict=True):
            if before is not tie:
                tie.slots.append(slot)
                self._by_slot[id(module), slot.name] = tie

    def moved(self) -> None:
        """The parameters of a module were moved or converted, which may have given it others."""
        for tie in self._all():
            held = {id(param) for slot in tie.slots if (param := slot.held()) is not None}
            if tie.broken_at is None and len(held) > 1:
                tie.broken_at = caller_site()

    def _all(self) -> Iterable[Tie]:
        return {id(tie): tie for tie in self._by_slot.values()}.values()

    def tell(self) -> None:
        """A recorded step is over."""
        _tell(self._recorder, self)

    def broken(self) -> Iterator[tuple[list[ParamInfo], Site | None]]:
        """The parameters that are trained in the place of one, and where that came to be."""
        for tie in self._all():
            infos = list(self._trained(tie))
            if len(infos) > 1:
                yield infos, tie.broken_at

    def _trained(self, tie: Tie) -> Iterator[ParamInfo]:
        """What the modules hold by now, each parameter once."""
        seen: set[int] = set()
        for slot in tie.slots:
            param = slot.held()
            info = None if param is None or not param.requires_grad else self._recorder.registry.find(param)
            if info is not None and info.id >= 0 and info.id not in seen:
                seen.add(info.id)
                yield info


def install(recorder: Recorder, patches: Patches) -> None:
    ties = recorder.ties = Ties(recorder)

    def watched(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def register_parameter(self: nn.Module, name: str, param: Tensor | None) -> None:
            original(self, name, param)
            if isinstance(param, nn.Parameter):
                _note(recorder, ties, self, name, param)

        return register_parameter

    def followed(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(original)
        def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            result = original(self, *args, **kwargs)
            _moved(recorder, ties)
            return result

        return _apply

    patches.replace(nn.Module, "register_parameter", watched)
    patches.replace(nn.Module, "_apply", followed)


@guarded("ties")
def _note(_: Recorder, ties: Ties, module: nn.Module, name: str, param: Tensor) -> None:
    ties.registered(module, name, param)


@guarded("ties")
def _moved(_: Recorder, ties: Ties) -> None:
    ties.moved()


@guarded("ties")
def _tell(recorder: Recorder, ties: Ties) -> None:
    for infos, site in ties.broken():
        places = {_memory(info.param) for info in infos} - {0}  # a rank may hold none of it
        params = recorder.registry.param_set(infos)
        recorder.emit(BrokenTie, params=params, in_one_memory=len(places) == 1 < len(infos), site=site)


def _is_by_torch() -> bool:
    """Whether the line that sets a parameter, behind the setters that torch's modules have, is torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(OWN_DIRS) and not (file == nn.modules.module.__file__ and function in _SETTERS):
            return file.startswith(TORCH_DIR)
        frame = frame.f_back
    return False


def _memory(param: Tensor) -> int:
    """Where its values lie, 0 where there are none."""
    return getattr(param, "_local_tensor", param).untyped_storage().data_ptr()
