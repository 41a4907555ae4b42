"""The map of weights as a picture, for programs that show images and no figures. Pillow comes with TensorBoard."""

from __future__ import annotations

import html
import io
from typing import TYPE_CHECKING, Any

from gradcheck_dist.reports.figure import Figure

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

_CELL = 34
_NARROW = 12
_FONT_SIZE = 12
_BLUE, _WHITE, _RED = (42, 111, 176), (244, 244, 242), (196, 84, 28)
_NONE, _INK, _PAPER = (200, 200, 200), (30, 30, 30), (255, 255, 255)


def png(figure: Figure) -> tuple[bytes, int, int]:
    """The figure of weights as (PNG, width, height): a row a holder, a column a contribution, white is right.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw, ImageFont

    (heat,) = figure.spec["data"]
    font = ImageFont.load_default(_FONT_SIZE)
    rows, columns = ([html.unescape(name) for name in heat[axis]] for axis in ("y", "x"))
    wide = "text" in heat
    told = [*columns, *(text for row in heat["text"] for text in row)] if wide else []
    cell = max([_CELL, *(_width(font, text) + 8 for text in told)]) if wide else _NARROW
    left = max([_width(font, name) for name in rows], default=0) + 12
    top = 2 * _FONT_SIZE + 14 + (_FONT_SIZE + 6 if wide else 0)
    title = f"{figure.title} (white is right, blue too small, red too large)"
    size = (max(left + cell * len(columns) + 8, _width(font, title) + 16), top + 24 * len(rows) + 28)
    image = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((8, 6), title, fill=_INK, font=font)
    for index, name in enumerate(columns if wide else ()):
        draw.text((left + cell * index + 2, top - _FONT_SIZE - 6), name, fill=_INK, font=font)
    for row, name in enumerate(rows):
        y = top + 24 * row
        draw.text((8, y + 4), name, fill=_INK, font=font)
        for column, value in enumerate(heat["z"][row]):
            x = left + cell * column
            draw.rectangle((x, y, x + cell - 2, y + 22), fill=_colour(value, heat["zmax"]))
            if wide and value is not None:
                ink = _PAPER if abs(value) > 0.5 * heat["zmax"] else _INK
                draw.text((x + 4, y + 4), heat["text"][row][column], fill=ink, font=font)
    foot = f"{columns[0]} to {columns[-1]}" if columns and not wide else "d: data rank, k: accumulation step"
    draw.text((left, size[1] - _FONT_SIZE - 10), foot, fill=_INK, font=font)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue(), *size


def _width(font: FreeTypeFont | ImageFont, text: str) -> int:
    return int(font.getlength(text))


def _colour(value: Any, limit: float) -> tuple[int, int, int]:
    if value is None:
        return _NONE
    share = max(-1.0, min(1.0, value / limit))
    end = _RED if share > 0 else _BLUE
    red, green, blue = (round(a + abs(share) * (b - a)) for a, b in zip(_WHITE, end, strict=True))
    return red, green, blue
