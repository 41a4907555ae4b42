"""How a torch.autograd.Function is applied: by a class method in Python up to torch 2.13, by one in C from 2.14 on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.autograd import Function


def application(found: Any) -> Callable[..., Any]:
    """`Function.apply` as a function of the class and its arguments. `found`: what stands in the class's dict."""
    return found.__func__ if isinstance(found, classmethod) else functools.partial(_applied, found)


def as_function(run: Callable[[], Any]) -> Any:
    """Run what ran inside of a torch.autograd.Function."""
    return run()


def in_function() -> bool:
    """Whether a torch.autograd.Function is under way, in training or in a replay of it. C leaves no frame: there it is
    seen where `application` runs it, which probes do."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CODES:
            return True
        frame = frame.f_back
    return False


def _applied(found: Any, cls: type, *args: Any, **kwargs: Any) -> Any:
    return found.__get__(None, cls)(*args, **kwargs)


_FOUND = Function.__dict__["apply"]
_CODES = {as_function.__code__, _applied.__code__}
if isinstance(_FOUND, classmethod):
    _CODES.add(_FOUND.__func__.__code__)
