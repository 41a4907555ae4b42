"""Whether torch.compile is in use, without importing Dynamo."""

from __future__ import annotations

import sys


def compiles() -> bool:
    """Whether torch.compile was called in this process: compiled code does not run the same under a dispatch mode, and
    looks at global hooks whenever it is called."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return any(getattr(frame, "cached_backends", {}).values())  # False stands for "not this function"
