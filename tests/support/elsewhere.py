"""Values of the CPU that probes are to believe on an accelerator: nobody may read them, and copies of them arrive late.

GRADCHECK_TEST_DEVICE=elsewhere does so in all tests (make test-elsewhere): what they find then is what is found on an
accelerator, as far as no kernel and no stream of its own takes part.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor


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
    replace(monkeypatch.setattr)


def replace(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Let all probes believe so."""
    importlib.import_module("gradcheck_dist.probes.all_probes")
    samples = importlib.import_module("gradcheck_dist.probes.recording.samples")
    for name, module in list(sys.modules.items()):
        if name.startswith("gradcheck_dist.probes") and hasattr(module, "is_host"):
            set_attribute(module, "is_host", lambda _: False)

    def start(_: Any, tensor: Tensor) -> tuple[Any, Tensor]:
        return Late(), tensor.clone()

    set_attribute(samples.HostCopies, "start", start)


def run(target: str, args: tuple[Any, ...]) -> Any:
    """What a rank was to do."""
    replace(setattr)
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(*args)
