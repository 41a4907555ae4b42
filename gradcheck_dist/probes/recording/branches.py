"""Calls that the source writes alike in both branches of one condition, such as the backward pass of a loop over
microbatches, which reduces in the last one only:

    if last:
        loss.backward()
    else:
        with model.no_sync():
            loss.backward()
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType

Place = tuple[int | None, ...]
"""(line, last line, column, last column)."""
Calls = Sequence[tuple[CodeType, Place]]
MAX_PLACES = 64


def of_one_loop(calls: Calls, others: Calls) -> bool:
    """Whether calls were made from the same places, or from branches of one condition that are written alike."""
    return len(calls) == len(others) and all(
        code is other and (place == there or _written_alike(code, place, there))
        for (code, place), (other, there) in zip(calls, others, strict=True)
    )


class CallPlaces:
    """Numbers of the places from which something was called; branches of one condition that are written alike have one
    number."""

    def __init__(self) -> None:
        self._known: list[Calls] = []

    def number(self, here: Calls) -> int | None:
        """None where there are too many to be told apart."""
        found = next((index for index, one in enumerate(self._known) if of_one_loop(one, here)), None)
        if found is None and len(self._known) < MAX_PLACES:
            found = len(self._known)
            self._known.append(here)
        return found


@functools.lru_cache(maxsize=1024)
def _written_alike(code: CodeType, place: Place, other: Place) -> bool:
    """Whether a function calls the same at two places, on what both branches of the condition around them set alike, or
    neither."""
    for condition in _conditions(code.co_filename):
        branches = (condition.body, condition.orelse)
        calls = [_call_at(branch, place) or _call_at(branch, other) for branch in branches]
        one, two = calls
        if one is None or two is None or ast.dump(one) != ast.dump(two):
            continue
        if {_place(one), _place(two)} != {place, other}:
            continue
        mine, others = (_set_before(branch, call) for branch, call in zip(branches, (one, two), strict=True))
        return mine == others and not _names(one, ast.Load) & _names(condition.test, ast.Store)
    return False


def _set_before(branch: Sequence[ast.stmt], call: ast.Call) -> Sequence[str]:
    """The statements of a branch up to a call that set a name, as they are written."""
    found: list[str] = []
    for statement in _bare(branch):
        if any(node is call for node in ast.walk(statement)):
            inner = (statement.body, statement.orelse) if isinstance(statement, ast.If) else ()  # an elif
            return found + [one for part in inner if call in set(_nodes(part)) for one in _set_before(part, call)]
        if _names(statement, ast.Store):
            found.append(ast.dump(statement))
    return found


def _bare(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements below those that open context managers."""
    for one in statements:
        if isinstance(one, ast.With):
            yield from _bare(one.body)
        else:
            yield one


@functools.lru_cache(maxsize=64)
def _conditions(file: str) -> Sequence[ast.If]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return [node for node in ast.walk(tree) if isinstance(node, ast.If) and node.orelse]


def _call_at(statements: Sequence[ast.stmt], place: Place) -> ast.Call | None:
    return next((call for call in _nodes(statements) if isinstance(call, ast.Call) and _place(call) == place), None)


def _nodes(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)


def _place(call: ast.Call) -> Place:
    return call.lineno, call.end_lineno, call.col_offset, call.end_col_offset


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
