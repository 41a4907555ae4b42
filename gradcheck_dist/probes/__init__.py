"""Probes: everything that a step does to a gradient, recorded without changing it. `attach()` puts them in place.

Importing this package imports no torch; its functions do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradcheck_dist.probes.session import Session, attach, availability, mark_loss

__all__ = ["Session", "attach", "availability", "mark_loss"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from gradcheck_dist.probes import session as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
