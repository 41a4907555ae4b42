"""Values of the CPU that probes are to believe on an accelerator: nobody may read them, and copies of them arrive
late."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch import Tensor

from gradcheck_dist.probes.recording.samples import HostCopies


class Late:
    """An event of an accelerator, behind which one poll finds nothing yet."""

    def __init__(self) -> None:
        self._asked = 0

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def synchronize(self) -> None:
        pass


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("gradcheck_dist.probes") and hasattr(module, "is_host"):
            monkeypatch.setattr(module, "is_host", lambda _: False)

    def start(_: HostCopies, tensor: Tensor) -> tuple[Any, Tensor]:
        return Late(), tensor.clone()

    monkeypatch.setattr(HostCopies, "start", start)
