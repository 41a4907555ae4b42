"""Whether an optimizer still has the parameters that its model has.

An optimizer that is made before the model is wrapped, moved or loaded keeps the parameters of before, where these are
replaced: FSDP2's fully_shard, parallelize_module, load_state_dict(assign=True), to_empty, a head that a line replaces.
One that is made behind a forward pass may get what FSDP2's root has gathered (pytorch/pytorch#149205). Backward gives
the new ones gradients; the optimizer finds none at the old ones, and steps nothing.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`_setattr_on_modules`), and those in ties.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from gradcheck_dist.events import ReplacedParameters, Site
from gradcheck_dist.probes.optimizers.ties import Slot
from gradcheck_dist.probes.parameters.plans import ParamInfo
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site


class Made:
    """What an optimizer was given that a module held then, by id, which stays its as long as the optimizer has it."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.site: Site | None = None
        self.is_sound = False
        """Nothing of it had been replaced at the end of a recorded step."""


class Replaced:
    """The optimizers that were made since the probes came."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._made: weakref.WeakKeyDictionary[Optimizer, Made] = weakref.WeakKeyDictionary()
        self._idle: list[tuple[list[ParamInfo], Site | None]] = []  # of the step that is over

    def given(self, optimizer: Optimizer, params: list[Tensor]) -> None:
        made = self._made.setdefault(optimizer, Made())
        made.site, made.is_sound = made.site or caller_site(), False
        ties = self._recorder.ties
        known = {id(param): slot for param in params if ties and (slot := ties.first_slot(param)) is not None}
        if len(known) < len(params):  # what FSDP2's modules hold behind a forward pass was registered nowhere
            known = {**self._held_now(), **known}
        made.slots |= {id(param): known[id(param)] for param in params if id(param) in known}

    def _held_now(self) -> dict[int, Slot]:
        return {
            id(held): Slot(weakref.ref(module), name)
            for module in self._recorder.registry.known_modules.values()
            for name, held in module._parameters.items()
            if held is not None
        }

    def tell(self) -> None:
        """A recorded step is over. Whoever updates parameters by hand may do so behind that."""
        if not all(made.is_sound for made in self._made.values()):
            _look(self._recorder, self)

    def settle(self) -> None:
        """The next step begins, or recording ends."""
        if self._idle:
            _settle(self._recorder, self)

    def look(self) -> None:
        self._idle = list(self._found())

    def settled(self) -> Iterator[tuple[list[ParamInfo], Site | None]]:
        """What had no optimizer, and has not moved since it was first seen: nobody else steps it, be it an optimizer
        that was made before the probes came."""
        idle, self._idle = self._idle, []
        for infos, site in idle:
            if still := [info for info in infos if self._recorder.registry.is_as_begun(info)]:
                yield still, site

    def _found(self) -> Iterator[tuple[list[ParamInfo], Site | None]]:
        """What the model has in the place of an optimizer's parameters that have neither gradient nor state, and that
        no optimizer has: what their modules hold now, or, where modules are gone, whatever else has a gradient."""
        owned = {id(param) for optimizer in self._made for param in _params(optimizer)}
        find = self._recorder.registry.find
        for optimizer, made in self._made.items():
            idle = [param for param in _params(optimizer) if param.grad is None and not optimizer.state.get(param)]
            slots = [made.slots[id(param)] for param in idle if id(param) in made.slots]
            new = [param for slot in slots if (param := slot.held()) is not None and param.requires_grad]
            if any(slot.module() is None for slot in slots):
                new += [info.param for info in self._recorder.registry.infos() if info.param.grad is not None]
            found = {info.id: info for param in new if id(param) not in owned and (info := find(param)) is not None}
            infos = [info for info in found.values() if info.id >= 0]
            made.is_sound = not infos
            if infos:
                yield infos, made.site


def install(recorder: Recorder, patches: Patches) -> None:
    recorder.replaced = Replaced(recorder)


@guarded("replaced")
def given(recorder: Recorder, optimizer: Optimizer) -> None:
    """An optimizer was given a group of parameters, its last one."""
    if recorder.replaced is not None:
        recorder.replaced.given(optimizer, optimizer.param_groups[-1]["params"])


@guarded("replaced")
def _look(_: Recorder, replaced: Replaced) -> None:
    replaced.look()


@guarded("replaced")
def _settle(recorder: Recorder, replaced: Replaced) -> None:
    for infos, site in replaced.settled():
        recorder.emit(ReplacedParameters, params=recorder.registry.param_set(infos), site=site)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
