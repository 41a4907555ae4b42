"""Where the program multiplies a loss by a number: `loss / world_size`, `loss *= 2`, and what stands there.

Autograd keeps the number, and not who wrote it: half a squared error and an error that is divided by two ranks look
alike in the graph. So the methods that multiply a tensor note on the node that they make from which instruction of the
caller's they were called, if the tensor is one number, and when a pass begins, the source of that instruction tells
what is written there.

`self` may be any tensor of the process, so its dimensions are asked first; and nothing is asked of a class with a
`__torch_function__` of its own, which would see it.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections import Counter
from collections.abc import Callable
from math import isfinite
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from gradcheck_dist.events import LossNumber
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses.loss_graph import name_of, other_operand
from gradcheck_dist.probes.losses.reductions import summands
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.marks import mark_multiplied, multiplied
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_instruction, is_installed, place_of

METHODS = (
    *("__mul__", "__rmul__", "__imul__", "mul", "mul_", "multiply", "multiply_"),
    *("__truediv__", "__itruediv__", "div", "div_", "divide", "divide_", "true_divide", "true_divide_"),
)
LONGEST = 60
"""Characters of what is written that are kept."""


def install(recorder: Recorder, patches: Patches) -> None:
    for name in METHODS:
        patches.replace(torch.Tensor, name, functools.partial(_watch, recorder))


def _watch(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    is_reflected = original.__name__ == "__rmul__"

    @functools.wraps(original)
    def multiply(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        if has_torch_function_unary(self) or self.dim() or torch.compiler.is_compiling():
            return made
        if isinstance(made, Tensor) and not made.dim() and made.requires_grad:
            _note(recorder, made, is_reflected)
        return made

    return multiply


@guarded("unseen")
def _note(recorder: Recorder, made: Tensor, is_reflected: bool) -> None:
    if recorder.suspended or not recorder.samples_upcoming:
        return
    at = caller_instruction()
    if at is not None and made.grad_fn is not None:
        mark_multiplied(made, (at, is_reflected))


def numbers_before(root: Root) -> list[LossNumber]:
    """The numbers that multiply all of a root, the outermost first, of which the program's source tells what is written
    there."""
    _, above, _ = summands(root.grad_fn, root.output_nr)
    found = []
    for node in above:
        told, factor = multiplied(node), _factor_of(node)
        if told is None or factor is None:
            continue
        (site, code, offset), is_reflected = told
        written = _written(code.co_filename, code, offset, is_reflected)
        if written is not None:
            found.append(LossNumber(factor, *written, site))
    return found


def _factor_of(node: Any) -> float | None:
    """What a node multiplies by; None for 1, and for what is not known without waiting for an accelerator."""
    other = other_operand(node)
    if type(other) is not Tensor or other.numel() != 1 or not is_host(other):
        return None
    number = float(other)
    if name_of(node) == "DivBackward":
        number = 1 / number if number else 0.0
    return number if number != 1 and number and isfinite(number) else None


@functools.lru_cache(maxsize=1024)
def _written(file: str, code: CodeType, offset: int, is_reflected: bool) -> tuple[str, str] | None:
    """ "/ world_size" of `loss / world_size`, and what the one assignment in the file gives that name, "" for none or
    several. None where the source does not tell. (The same code in two files is equal.)"""
    place = place_of(code, offset)
    lines = linecache.getlines(file)
    if len(place) != len(("first", "last", "from", "to")) or None in place or len(lines) < (place[1] or 0):
        return None
    first, last, begin, end = (number or 0 for number in place)
    try:
        cut = [line.encode() for line in lines[first - 1 : last]]
        cut[-1] = cut[-1][:end]
        cut[0] = cut[0][begin:]
        (statement,) = ast.parse(b"".join(cut) if first == last else b"(" + b"".join(cut) + b")").body
    except (SyntaxError, ValueError, RecursionError):
        return None
    match statement:
        case ast.Expr(ast.BinOp(left, ast.Mult() | ast.Div() as op, right)):
            operand, sign = left if is_reflected else right, "*" if isinstance(op, ast.Mult) else "/"
        case ast.AugAssign(_, ast.Mult() | ast.Div() as op, operand):
            sign = "*" if isinstance(op, ast.Mult) else "/"
        case ast.Expr(ast.Call(ast.Attribute(_, name), [operand, *_])) if name in METHODS:
            sign = "*" if "mul" in name else "/"
        case _:
            return None
    text = ast.unparse(operand)
    written = f"{sign} ({text})" if isinstance(operand, ast.BinOp) else f"{sign} {text}"
    is_name = isinstance(operand, ast.Name | ast.Attribute) and not is_installed(file)
    return written[:LONGEST], _assigned("".join(lines), text)[:LONGEST] if is_name else ""


@functools.lru_cache(maxsize=64)
def _assignments(source: str) -> dict[str, str]:
    """What names and attributes are assigned in a file, "" for those that are given several things, or get their value
    otherwise as well (an argument, a loop's variable)."""
    found: dict[str, str] = {}
    num_assigned, num_given = Counter[str](), Counter[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            num_given[node.arg] += 1
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            num_given[ast.unparse(node)] += 1
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.AugAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name, value in _pairs(target, node.value):
                    found[name] = value if found.setdefault(name, value) == value else ""
                    num_assigned[name] += 1
    return {name: value for name, value in found.items() if num_given[name] == num_assigned[name]}


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[str, str]]:
    """`a, b = 1, 2` as its parts."""
    if isinstance(target, ast.Tuple | ast.List):
        apart = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        values = value.elts if isinstance(value, ast.Tuple | ast.List) and apart else [value] * len(target.elts)
        return [pair for one, given in zip(target.elts, values, strict=True) for pair in _pairs(one, given)]
    return [(ast.unparse(target), ast.unparse(value))]


def _assigned(source: str, name: str) -> str:
    try:
        return _assignments(source).get(name, "")
    except (SyntaxError, ValueError, RecursionError):
        return ""
