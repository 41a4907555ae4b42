"""A vertical scrollbar past Textual's cache of decorated lines: it has no border, and changes whole at every scroll."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.filter import ANSIToTruecolor, DimFilter
from textual.geometry import Region
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip


class LightScrollBar(ScrollBar):
    """Looks and acts as Textual's own; most of its lines are one and the same strip."""

    def render_lines(self, crop: Region) -> list[Strip]:
        bar = self.render()
        style = bar.style if isinstance(bar, ScrollBarRender) else None
        plain = all(isinstance(one, DimFilter | ANSIToTruecolor) for one in self.get_line_filters())
        if not plain or not isinstance(bar, ScrollBarRender) or not isinstance(style, Style):
            return super().render_lines(crop)
        if style.color is None or style.bgcolor is None:
            return super().render_lines(crop)
        drawn = bar.render_bar(
            size=self.size.height,
            virtual_size=bar.virtual_size,
            window_size=bar.window_size,
            position=bar.position,
            thickness=bar.thickness,
            vertical=True,
            back_color=style.bgcolor,
            bar_color=style.color,
        )
        segments: list[Segment] = list(drawn.segments)
        made = {id(one): Strip([one], bar.thickness) for one in segments}
        return [made[id(one)] for one in segments[crop.y : crop.bottom]]
