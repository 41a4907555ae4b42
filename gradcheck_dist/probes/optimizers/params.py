"""Parameters as optimizers and clips list them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.recorder import Recorder


def params_of(recorder: Recorder, params: Iterable[Tensor], *, owner: bool = False) -> list[ParamInfo]:
    registry = recorder.registry
    params = list(params)
    found = registry.asked_before(params, owner=owner)
    if found is not None:
        return found
    registry.adopt(params, owner=owner)
    infos = [registry.read_by_optimizer(param) or _unnamed(recorder, param) for param in params]
    return registry.answered(params, infos, owner=owner)


def _unnamed(recorder: Recorder, param: Tensor) -> ParamInfo:
    """A parameter that belongs to no module that was called: watched from the next step on."""
    info = recorder.registry.add_unnamed(param)
    recorder.discovery.hook(info, param)
    return info
