"""Why a data-parallel wrapper did not reduce in a pass, and what lets it, in words."""

from __future__ import annotations

from gradcheck_dist.events import UNSYNCED_PAST, UNSYNCED_TOLD, UNSYNCED_WAITS, Event

_WHY = {
    UNSYNCED_TOLD: "it was told not to",
    UNSYNCED_PAST: "the model was called past it",
    UNSYNCED_WAITS: "it waits for a parameter that the pass left out",
}
_FIX = {
    UNSYNCED_TOLD: "leave no_sync() before its forward (FSDP2 and replicate: set_requires_gradient_sync(True))",
    UNSYNCED_PAST: "compute gradients through the wrapped module, not through what it wraps (model.module)",
    UNSYNCED_WAITS: "leave no trained parameter of it out, or wrap it with find_unused_parameters=True",
}


def unsynced(event: Event | None) -> str:
    """UNSYNCED_TOLD and its like; "" where it is not known that a wrapper did not reduce, or not why."""
    return getattr(event, "unsynced", None) or ""


def why_unsynced(event: Event | None) -> str:
    """Why the wrapper did not reduce in this pass; what may be, where that is not known."""
    return _of(_WHY, event, "or")


def syncing(event: Event | None) -> str:
    """What lets the wrapper reduce in this pass."""
    return _of(_FIX, event, "and")


def _of(words: dict[str, str], event: Event | None, between: str) -> str:
    told = words.get(unsynced(event))
    *others, last = words.values()
    return told or f"{', '.join(others)}, {between} {last}"
