"""Collectives that a coalescing manager holds back until it is left, as Megatron-LM's buckets are reduced.

Source: torch/distributed/distributed_c10d.py, _coalescing_manager: inside of it all_reduce and reduce_scatter_tensor
note what they are given and return.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded

_NAME = "_coalescing_manager"


class Coalesced:
    """What has to wait until collectives that were called have run."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def holds(self, group: Any) -> bool:
        """Whether a collective over the group is held back now."""
        world = getattr(distributed_c10d, "_world", None)
        return (group or dist.group.WORLD) in getattr(world, "pg_coalesce_state", ())

    def afterwards(self, held: bool, call: Callable[[], None]) -> None:
        """Call it when the manager is left, or at once where none holds anything back."""
        if held:
            self._waiting.append(call)
        else:
            call()

    def take(self) -> list[Callable[[], None]]:
        waiting, self._waiting = self._waiting, []
        return waiting


def install(recorder: Recorder, patches: Patches) -> Coalesced:
    coalesced = Coalesced()

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        @contextlib.contextmanager
        def manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
            coalesced.take()  # of a manager that broke off
            with original(*args, **kwargs) as held:
                yield held
            _left(recorder, coalesced, bool(getattr(held, "works", ())))

        return manager

    original = getattr(distributed_c10d, _NAME, None)
    if original is not None:
        patches.replace(distributed_c10d, _NAME, watch)
        patched = getattr(distributed_c10d, _NAME)
        if getattr(dist, _NAME, None) is original:
            patches.replace(dist, _NAME, lambda _: patched)
    return coalesced


@guarded("collectives")
def _left(_: Recorder, coalesced: Coalesced, under_way: bool) -> None:
    for call in coalesced.take():
        if not under_way:
            call()
