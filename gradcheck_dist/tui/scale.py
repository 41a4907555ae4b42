"""The colour of a ratio: log2 scale from blue (too small) over white (right) to orange (too large).

Blue and orange stay apart for every kind of colour blindness, and every cell also carries a sign.
"""

from __future__ import annotations

import math
from functools import lru_cache

from rich.color import Color
from rich.style import Style

LIMIT = 3.0
"""Ratios from 2**-LIMIT to 2**LIMIT are told apart by colour; beyond, colour stands still."""

_BLUE = ((235, 240, 246), (146, 190, 232), (66, 133, 200), (22, 78, 150))
_ORANGE = ((245, 240, 232), (250, 190, 120), (235, 130, 30), (178, 78, 0))


def sign(ratio: float, right: bool) -> str:
    """One character that tells without colour."""
    if math.isnan(ratio):
        return "?"
    if right:
        return "="
    if ratio == 0:
        return "0"
    if ratio < 0:
        return "-"
    return "▼" if ratio < 1 else "▲"


def style(ratio: float, right: bool) -> Style:
    """Background and a readable foreground."""
    if math.isnan(ratio):
        return _style(None, 0)
    if right:
        return _style(0, 0)
    if ratio <= 0:
        return _style(-9, 0)
    level = max(-LIMIT, min(LIMIT, math.log2(ratio)))
    return _style(1 if level > 0 else -1, round(abs(level) * 8))


@lru_cache(maxsize=128)
def _style(side: int | None, eighths: int) -> Style:
    if side is None:
        return Style(color=Color.from_rgb(150, 150, 150), bgcolor=Color.from_rgb(70, 70, 70))
    if side == -9:  # nothing arrived at all
        return Style(color=Color.from_rgb(255, 255, 255), bgcolor=Color.from_rgb(0, 0, 0), bold=True)
    if side == 0:
        return Style(color=Color.from_rgb(40, 40, 40), bgcolor=Color.from_rgb(240, 240, 240))
    stops = _ORANGE if side > 0 else _BLUE
    # Also the smallest deviation must differ from right: the scale begins a third of the way up.
    position = 0.34 * 3 / LIMIT + (eighths / 8) * (3 - 0.34 * 3 / LIMIT) / LIMIT
    low = min(int(position), 2)
    part = position - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(stops[low], stops[low + 1], strict=True))
    dark = 0.3 * red + 0.59 * green + 0.11 * blue < 140
    text = (255, 255, 255) if dark else (20, 20, 20)
    return Style(color=Color.from_rgb(*text), bgcolor=Color.from_rgb(red, green, blue))


def legend() -> list[tuple[str, Style]]:
    """The scale as pieces of text."""
    pieces = [(f" {name} ", style(value, value == 1)) for name, value in _LEGEND]
    return [*pieces, (" 0 ", style(0.0, False)), (" ? ", style(math.nan, False))]


_LEGEND = (("1/8", 0.125), ("1/4", 0.25), ("1/2", 0.5), ("1", 1.0), ("2", 2.0), ("4", 4.0), ("8", 8.0))


@lru_cache(maxsize=4096)
def short(ratio: float) -> str:
    """A ratio in at most six characters: "4", "1/4", "0.853", "1.64"."""
    if math.isnan(ratio):
        return "?"
    if ratio == 0 or math.isinf(ratio):
        return f"{ratio:.0f}"
    for value, prefix in ((ratio, ""), (1 / ratio, "1/")):
        whole = round(value)
        if 1 <= abs(whole) < 1000 and abs(value - whole) < 5e-4 * abs(whole):
            return f"{prefix}{whole}" if prefix == "" or whole != 1 else f"{whole}"
    text = f"{ratio:.3g}"
    return text if len(text) <= 7 else f"{ratio:.1e}"


@lru_cache(maxsize=4096)
def brief(ratio: float, width: int) -> str:
    """A ratio in at most `width` characters, four or more, rounded to what fits: never a piece of it."""
    texts = [short(ratio), f"{ratio:.3g}", f"{ratio:.2g}", _without_zero(f"{ratio:.2g}"), _without_zero(f"{ratio:.1g}")]
    if math.isfinite(ratio):
        mantissa, exponent = f"{ratio:.0e}".split("e")
        texts.append(f"{mantissa}e{int(exponent)}")
    return next((text for text in texts if len(text) <= width), "≈0" if abs(ratio) < 1 else "huge")


def _without_zero(text: str) -> str:
    return text.replace("0.", ".", 1) if text.lstrip("-").startswith("0.") else text


def distance(ratio: float) -> float:
    """How far a ratio is from 1, on the log2 scale."""
    return abs(math.log2(abs(ratio))) if ratio else math.inf
