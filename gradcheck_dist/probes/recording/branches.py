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


def of_one_loop(calls: Calls, others: Calls) -> bool:
    """Whether calls were made from the same places, or from branches of one condition that are written alike."""
    return len(calls) == len(others) and all(
        code is other and (place == there or _written_alike(code, place, there))
        for (code, place), (other, there) in zip(calls, others, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def _written_alike(code: CodeType, place: Place, other: Place) -> bool:
    """Whether a function calls the same at two places, on what neither branch of the condition around them sets."""
    for condition in _conditions(code.co_filename):
        branches = [_call_at(branch, place) or _call_at(branch, other) for branch in (condition.body, condition.orelse)]
        one, two = branches
        if one is None or two is None or ast.dump(one) != ast.dump(two):
            continue
        if {_place(one), _place(two)} != {place, other}:
            continue
        return not _names(one, ast.Load) & _names(condition, ast.Store)
    return False


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
