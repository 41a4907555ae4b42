"""Asynchronous reductions whose results an optimizer waits for in its own step, as distributed Muon and Adam do.

Nothing reads `.grad` again behind such a wait: what came is sampled there. The methods of torch's `Work` and `Future`
are replaced once a first optimizer reduces so, and nothing is held beyond its step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcheck_dist.probes.recording.dynamo import untraced
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded


class Awaited:
    """What is to be sampled when somebody has waited for it."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self._recorder, self._patches = recorder, patches
        self._waiting: list[tuple[list[Any], Callable[[], None]]] = []  # under which objects it is waited for
        self._watched = False

        def forget(*_: Any) -> None:
            self._waiting.clear()

        patches.on_restore(register_optimizer_step_post_hook(untraced(forget)).remove)

    def later(self, work: Any, sample: Callable[[], None]) -> None:
        """Sample when `work`, or the future that it gives, has been waited for."""
        if not self._watched:
            self._watched = True
            self._patches.replace(dist.Work, "wait", self._watch_wait)
            self._patches.replace(dist.Work, "get_future", self._watch_future)
            self._patches.replace(torch._C.Future, "wait", self._watch_wait)
        self._waiting.append(([work], sample))

    def came(self, one: Any) -> None:
        ready = [sample for known, sample in self._waiting if any(other is one for other in known)]
        self._waiting = [entry for entry in self._waiting if not any(other is one for other in entry[0])]
        for sample in ready:
            sample()

    def known_as(self, work: Any, future: Any) -> None:
        for known, _ in self._waiting:
            if any(other is work for other in known):
                known.append(future)

    def _watch_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(one: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(one, *args, **kwargs)
            if self._waiting:
                _came(self._recorder, self, one)
            return result

        return wait

    def _watch_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any, *args: Any, **kwargs: Any) -> Any:
            future = original(work, *args, **kwargs)
            if self._waiting:
                _known_as(self._recorder, self, work, future)
            return future

        return get_future


@guarded("collectives")
def _came(_: Recorder, awaited: Awaited, one: Any) -> None:
    awaited.came(one)


@guarded("collectives")
def _known_as(_: Recorder, awaited: Awaited, work: Any, future: Any) -> None:
    awaited.known_as(work, future)
