"""The way of one contribution to the optimizer, stop by stop, with its ratio after each."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gradcheck_dist.tui import scale
from gradcheck_dist.tui.lanes import LETTERS, name_of
from gradcheck_dist.tui.step_view import Stop
from gradcheck_dist.tui.widgets.rows import Piece, Rows, fit

SAME = 1e-3


class StopsList(Rows):
    """`~` before a ratio: carried on by documented factors, not measured there."""

    header_rows = 1
    stops: list[Stop] = []
    culprits: Collection[tuple[int, int]] = ()  # rank and seq

    def show(self, stops: list[Stop], culprits: Collection[tuple[int, int]]) -> None:
        self.stops, self.culprits = stops, culprits
        self.count = len(stops)
        self.refresh()

    def header(self, row: int) -> Iterable[Piece]:
        yield fit("rank event", max(14, self.size.width - 9)) + fit("ratio", 8, "right"), "head"

    def pieces(self, index: int) -> Iterable[Piece]:
        stop = self.stops[index]
        culprit = (stop.rank, stop.seq) in self.culprits
        name = name_of(stop.event) if stop.event is not None and type(stop.event) in LETTERS else "sample"
        k = getattr(stop.event, "accumulation_step", None)
        microbatch = getattr(stop.event, "microbatch", None)
        where = (f" k={k}" if k is not None else "") + (f" m={microbatch}" if microbatch else "")
        sign = "▶" if culprit else " "
        yield fit(f"{sign}r{stop.rank} {name}{where}", max(14, self.size.width - 9)), "bad" if culprit else "plain"
        right = abs(stop.after - 1) <= SAME
        text = ("" if stop.sampled else "~") + scale.short(stop.after)
        yield fit(text, 8, "right"), scale.style(stop.after, right) if abs(stop.after - stop.before) > 0 else "plain"

    def empty(self) -> str:
        return "no event is known on this path"
