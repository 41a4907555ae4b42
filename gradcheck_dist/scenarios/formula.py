"""Small arithmetic over named integers, in exact fractions, as scenario files write ratios: "R**(K-1-k)".

A comparison counts 1 where it holds and 0 where not: "r == h" keeps the own rank's contributions alone.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from gradcheck_dist.axes import AXIS_NAMES
from gradcheck_dist.errors import GradcheckError

NAMES = {
    "R": "data-parallel ranks, times cp",
    "K": "accumulation steps",
    "M": "microbatches of one accumulation step",
    "S": "sequences of the step on all ranks",
    "N": "tokens of the step on all ranks",
    "N_r": "tokens of the step on the contribution's data rank",
    "n_c": "tokens of the contribution",
    "k": "accumulation step of the contribution, from 0",
    "m": "microbatch of the contribution, from 0",
    "r": "data rank of the contribution, from 0",
    "h": "data rank of the rank that holds the gradient, from 0",
} | {axis: f"degree of {axis}" for axis in AXIS_NAMES}
MAX_BITS = 100_000
_TRIAL = dict.fromkeys(AXIS_NAMES, 2)
_TRIAL |= {"R": 3, "K": 5, "M": 4, "S": 61, "N": 997, "N_r": 331, "n_c": 67, "k": 2, "m": 1, "r": 1, "h": 2}
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Fraction, Fraction], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Formula:
    """A parsed formula.

    Raises:
        GradcheckError: E602 it is not arithmetic over the known names.
    """

    text: str

    def __post_init__(self) -> None:
        self.evaluate(_TRIAL)

    def evaluate(self, values: Mapping[str, int]) -> Fraction:
        """The exact value where every name in NAMES has its value in `values`."""
        try:
            return _value(ast.parse(self.text, mode="eval").body, values)
        except ZeroDivisionError:
            raise self._error("it divides by zero") from None
        except (SyntaxError, ValueError, RecursionError) as error:
            raise self._error(str(error)) from None

    def _error(self, reason: str) -> GradcheckError:
        return GradcheckError(
            f"formula {self.text!r} cannot be evaluated: {reason}. Legal are integers, + - * / // % **, comparisons (1 "
            "where they hold, else 0) and parentheses over "
            + ", ".join(f"{name} ({meaning})" for name, meaning in NAMES.items())
            + ".",
            code="E602",
        )


def _value(node: ast.expr, values: Mapping[str, int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.Name):
        if node.id not in NAMES:
            raise ValueError(f"unknown name {node.id!r}")
        return Fraction(values[node.id])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, values)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, values), _value(node.right, values)
        if isinstance(node.op, ast.Pow):
            if right.denominator != 1:
                raise ValueError(f"exponent {right} is no integer")
            if max(abs(left.numerator), left.denominator).bit_length() * abs(right) > MAX_BITS:
                raise ValueError("the result is too large")
            return left ** int(right)
        if type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        left, right = _value(node.left, values), _value(node.comparators[0], values)
        return Fraction(int(_COMPARISONS[type(node.ops[0])](left, right)))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed")
