"""Numbers of a coarser type: whether what is held in a finer one was once rounded to it."""

from __future__ import annotations

import numpy as np

from gradcheck_dist.ledger.solve import EPSILON

MIN_ON_GRID = 8
"""Elements that must lie on the grid of a coarser type: one of 2^13 float32 numbers does by chance."""
MORE_DIGITS = {"float16": 0x1FFF, "bfloat16": 0xFFFF}
"""Bits of a float32 that a coarser type has not."""


def on_grid(values: np.ndarray, dtype: str, factor: float | None = None) -> bool:
    """Whether all elements lie on a type's grid, or, once rounded, on `factor` times it."""
    if factor is None and _are_off(values[:MIN_ON_GRID], dtype):
        return False  # most are not, and the first show it
    told = values[np.isfinite(values) & (values != 0)]
    if len(told) < MIN_ON_GRID or np.abs(told).max() > np.finfo(np.float16).max:
        return False
    if factor is not None:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # some write zero, or next to nothing
            before = told / factor
            near = before.astype(np.float16).astype(float) if dtype == "float16" else _to_bfloat16(before)
            return bool((np.abs(near * factor - told) <= EPSILON["float32"] * np.abs(told)).all())
    if dtype == "float16":
        return bool((told.astype(np.float16) == told).all())
    single = told.astype(np.float32)
    return bool((single == told).all() and not (single.view(np.uint32) & 0xFFFF).any())


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(float)


def _are_off(values: np.ndarray, dtype: str) -> bool:
    """Whether any of them surely lies beside a type's grid: it has digits that the type has not."""
    more = (values.astype(np.float32).view(np.uint32) & MORE_DIGITS[dtype]) != 0
    return bool((more & np.isfinite(values)).any())
