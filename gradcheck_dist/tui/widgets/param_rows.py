"""The modules as a tree, each with its worst ratio, its norm and what could be seen of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from textual.binding import Binding, BindingType

from gradcheck_dist.reports.text import clip
from gradcheck_dist.tui import scale
from gradcheck_dist.tui.step_view import ParamLine
from gradcheck_dist.tui.widgets.rows import Piece, Rows, fit
from gradcheck_dist.wording import plural


@dataclass
class Node:
    """A module or a parameter."""

    name: str
    path: str
    depth: int
    line: ParamLine | None = None
    children: dict[str, Node] = field(default_factory=dict)
    leaves: list[ParamLine] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        known = [leaf.ratio for leaf in self.leaves if leaf.ratio is not None]
        return max(known, key=scale.distance, default=None)

    @property
    def right(self) -> bool:
        return all(leaf.right for leaf in self.leaves)

    @property
    def norm(self) -> float | None:
        known = [leaf.norm for leaf in self.leaves if leaf.norm is not None]
        return math.sqrt(sum(norm * norm for norm in known)) if known else None

    @property
    def num_seen(self) -> int:
        return sum(bool(leaf.num_cells) for leaf in self.leaves)


class ParamRows(Rows):
    """Enter folds and unfolds a module; on a parameter it opens its event path."""

    header_rows = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "fold(1)", "Fold", show=False),
        Binding("right", "fold(0)", "Unfold", show=False),
    ]
    _shown: list[Node] = []
    _root: Node | None = None
    _params: Sequence[ParamLine] = ()
    _folded: set[str] = set()
    _filter = ""

    def show(self, params: Sequence[ParamLine], contains: str = "") -> None:
        if params is not self._params or contains != self._filter:
            if params is not self._params:
                self._folded = set(self._folded)
            self._params, self._filter = params, contains
            self._root = build_tree([line for line in params if contains.lower() in line.key[1].lower()])
            self._flatten()

    def _flatten(self) -> None:
        self._shown = list(_walk(self._root, self._folded)) if self._root is not None else []
        self.count = len(self._shown)
        self.refresh()

    def at_cursor(self) -> Node | None:
        return self._shown[self.cursor] if self.cursor < len(self._shown) else None

    def action_fold(self, fold: int) -> None:
        node = self.at_cursor()
        if node is None:
            return
        if fold and (node.line is not None or node.path in self._folded):
            above = [i for i in range(self.cursor) if self._shown[i].depth < node.depth]
            self.cursor = above[-1] if above else self.cursor
            return
        (self._folded.add if fold else self._folded.discard)(node.path)
        self._flatten()

    def action_choose(self) -> None:
        node = self.at_cursor()
        if node is not None and node.line is None:
            self.action_fold(int(node.path not in self._folded))
        else:
            super().action_choose()

    @property
    def _name_width(self) -> int:
        return max(20, min(60, self.size.width - 44))

    @property
    def _rest_width(self) -> int:
        return max(1, self.size.width - self._name_width - 23)  # but for name, ratio, norm, and the scrollbar

    def header(self, row: int) -> Iterable[Piece]:
        yield fit("module / parameter", self._name_width), "head"
        yield f"{'ratio':>8}  {'norm':>10}  observed", "head"

    def pieces(self, index: int) -> Iterable[Piece]:
        node = self._shown[index]
        sign = " " if node.line is not None else "▸" if node.path in self._folded else "▾"
        yield fit("  " * node.depth + f"{sign} {node.name}", self._name_width), "plain" if node.line else "bold"
        ratio, norm = node.ratio, node.norm
        if ratio is None:
            yield f"{'?':>8}", scale.style(math.nan, False)
        else:
            yield f"{scale.sign(ratio, node.right)}{scale.short(ratio):>7}", scale.style(ratio, node.right)
        yield f"  {'-' if norm is None else format(norm, '.4g'):>10}  ", "plain"
        if node.line is None:
            yield clip(f"{node.num_seen} of {plural(len(node.leaves), 'parameter')}", self._rest_width), "dim"
        elif not node.line.num_cells:
            yield clip(f"unidentifiable: {node.line.reason or 'no gradient of it was seen'}", self._rest_width), "warn"
        else:
            unknown = f", {node.line.num_unknown} unidentifiable" if node.line.num_unknown else ""
            yield clip(f"{plural(node.line.num_cells, 'weight')}{unknown}", self._rest_width), "dim"

    def empty(self) -> str:
        return "no parameter matches" if self._filter else "no weight of a parameter is known: see 1 Overview for why"


def build_tree(params: Sequence[ParamLine]) -> Node:
    """Modules by the dots in parameter names; pipeline stages stand at the top where there are several."""
    root = Node("", "", -1)
    stages = {line.key[0] for line in params}
    for line in params:
        parts = line.key[1].split(".")
        if len(stages) > 1:
            parts.insert(0, f"stage {line.key[0]}")
        node = root
        node.leaves.append(line)
        for depth, part in enumerate(parts):
            path = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, Node(part, path, depth))
            node.leaves.append(line)
        node.line = line
    return root


def _walk(node: Node, folded: set[str]) -> Iterable[Node]:
    for child in node.children.values():
        yield child
        if child.path not in folded:
            yield from _walk(child, folded)
