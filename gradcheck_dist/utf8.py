"""Text that has no UTF-8: names of files whose bytes are none hold lone surrogates (PEP 383)."""

from __future__ import annotations

from typing import Any


def encodable(value: Any) -> Any:
    """What msgspec.to_builtins gave, with an escape in the place of each lone surrogate."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list | tuple) else value
