"""The three ledgers of the cell under the cursor."""

from __future__ import annotations

import math

from rich.text import Text
from textual.widgets import Static

from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.tui import scale
from gradcheck_dist.tui.grid import Slice


class CellBox(Static):
    """Expected, nominal, observed, ratio; below it the colour scale.

    `accused`: whether the run has findings. Of one that could not be judged, a weight that differs may be meant.
    """

    DEFAULT_CSS = "CellBox { height: 6; border: round $primary; padding: 0 1; text-wrap: nowrap; }"

    accused = False
    _shown: tuple[Slice, int, int] | None = None

    def on_resize(self) -> None:
        if self._shown is not None:
            self.show(*self._shown)

    def show(self, part: Slice, row: int, column: int) -> None:
        self._shown = part, row, column
        if not (row < part.shape[0] and column < part.shape[1]):
            self.update("")
            return
        expected, nominal, observed, ratio = part.cell(row, column)
        (unit, rank), key = part.origin(row, column)
        right = abs(ratio - 1.0) <= part.grid.tolerance
        how = ", as documented: no sample was measured" if part.grid.documented else ""
        self.border_title = f"weight of one token's loss, step {part.grid.step}{how}"
        tokens = part.grid.tokens.get(key)
        text = Text(no_wrap=True, overflow="ellipsis")
        if part.grid.documented:
            text.append(f"k{key[1]} m{key[2]}", "bold").append(f" of rank {rank}, in every gradient")
        else:
            text.append(f"d{key[0]} k{key[1]} m{key[2]}", "bold").append(
                f" ({tokens if tokens is not None else '?'} tokens) in "
            )
            text.append(printable(unit, 60), "bold").append(f" on rank {rank}")
        merged = part.num_merged(row, column)
        text.append(f", worst of {merged}\n" if merged > 1 else "\n", "italic")
        exact = part.grid.exact.get(key)
        wide, narrow = self.size.width > 95 and exact, self.size.width < 76
        digits = 3 if narrow else 5
        text.append("expected ").append(exact if exact else _number(expected, digits), "bold")
        text.append(f" = {_number(expected)}" if wide else "")
        text.append("  nominal ").append(_number(nominal, digits), "bold")
        text.append("  observed ").append(_number(observed, digits), "bold")
        text.append("\nratio " if narrow else "  ratio ").append(f" {scale.short(ratio)} ", scale.style(ratio, right))
        wrong = " WRONG\n" if self.accused else " differs\n"
        text.append(" right\n" if right else " not known\n" if math.isnan(ratio) else wrong, "bold")
        if not narrow:
            text.append(f"tolerance {part.grid.tolerance:.1g}; d data rank, k accumulation step, m microbatch\n", "dim")
        for piece, style in scale.legend():
            text.append(piece, style)
        text.append(" = right ▼ less ▲ more" if narrow else " ratio: = right ▼ too small ▲ too large", "dim")
        self.update(text, layout=False)


def _number(value: float, digits: int = 5) -> str:
    return "-" if math.isnan(value) else number(value, digits)
