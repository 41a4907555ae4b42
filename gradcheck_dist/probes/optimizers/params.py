"""Parameters as optimizers and clips list them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import with_memory
from gradcheck_dist.probes.recording.recorder import Recorder

NEW_LISTENERS: list[Callable[[Recorder], None]] = []
"""Called where parameters turned up that no module has shown."""


def params_of(
    recorder: Recorder, params: Iterable[Tensor], *, owner: bool = False, inside: bool = False
) -> list[ParamInfo]:
    registry = recorder.registry
    params = with_memory(params)
    if inside:
        registry.steps_inside(params)
    found = registry.asked_before(params, owner=owner)
    if found is not None:
        return found
    registry.adopt(params, owner=owner, inside=inside)
    num_known = len(registry.infos())
    infos = [registry.read_by_optimizer(param) or _unnamed(recorder, param) for param in params]
    if len(registry.infos()) > num_known:
        for listener in NEW_LISTENERS:
            listener(recorder)
    return registry.answered(params, infos, owner=owner)


def _unnamed(recorder: Recorder, param: Tensor) -> ParamInfo:
    """A parameter that belongs to no module that was called: watched from the next step on."""
    info = recorder.registry.add_unnamed(param)
    recorder.discovery.hook(info, param)
    return info
