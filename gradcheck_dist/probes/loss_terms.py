"""The terms that a loss adds up, and which of them hold no loss that anybody counts tokens of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

MAX_NODES = 100
"""Nodes behind a root, or behind one of its terms, that are looked at; a trainer's losses lie within ten of it."""
_SUMS = {"AddBackward", "SubBackward"}
_FACTORS = {"MulBackward", "DivBackward", "NegBackward"}


def uncounted_terms(root: Any, name_of: Callable[[Any], str], ends: Callable[[Any], bool | None]) -> int:
    """How many of the summands of a root are no counted losses: a distance, a penalty, another task's loss.

    Args:
        root: the autograd node of a scalar.
        name_of: a node's name.
        ends: True for a node of a counted loss, False for one behind which none is looked for, else None.

    0 where the root is no sum. A summand is followed through factors that have no gradient.
    """
    if root is None:
        return 0
    summands: list[Any] = []
    todo = [root]
    while todo and len(summands) < MAX_NODES:
        node = todo.pop()
        operands = [following for following, _ in node.next_functions if following is not None]
        name = name_of(node)
        if ends(node) is None and (name in _SUMS or (name in _FACTORS and len(operands) == 1)):
            todo += operands
        else:
            summands.append(node)
    return sum(not _is_counted(node, ends) for node in summands) if len(summands) > 1 else 0


def _is_counted(node: Any, ends: Callable[[Any], bool | None]) -> bool:
    queue, visited = deque([node]), set[Any]()
    while queue and len(visited) < MAX_NODES:
        one = queue.popleft()
        if one is None or one in visited:
            continue
        visited.add(one)
        end = ends(one)
        if end:
            return True
        if end is None:
            queue.extend(following for following, _ in one.next_functions)
    return False
