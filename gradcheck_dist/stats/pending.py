"""Statistics that are under way on a device: read at the end of the step, when nobody has to wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.stats.result import GradientStats


class Pending:
    """The promise of statistics. `result()` waits for the one copy to the host and may be called again."""

    def __init__(
        self, finish: Callable[[list[Tensor]], GradientStats], on_device: list[Tensor], keep: tuple[Any, ...] = ()
    ) -> None:
        self._finish = finish
        self._keep: tuple[Any, ...] = (keep, on_device)  # what the device may still be reading
        self._event: torch.cuda.Event | None = None
        self._stats: GradientStats | None = None
        if all(tensor.device.type == "cuda" for tensor in on_device) and on_device:
            self._on_host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in on_device]
            for host, device in zip(self._on_host, on_device, strict=True):
                host.copy_(device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(on_device[0].device))
        else:
            self._on_host = [tensor.cpu() for tensor in on_device]

    @property
    def ready(self) -> bool:
        """Whether `result()` returns without waiting."""
        return self._event is None or self._event.query()

    def query(self) -> bool:
        """The same under the name that an accelerator's event gives it."""
        return self.ready

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._event is not None:
            self._event.synchronize()

    def result(self) -> GradientStats:
        """The statistics; waits for the device if it has not come so far."""
        if self._stats is None:
            if self._event is not None:
                self._event.synchronize()
            self._stats = self._finish(self._on_host)
            self._keep = ()
        return self._stats
