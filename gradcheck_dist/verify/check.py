"""One module: does its backward give the derivative of its forward, for every parameter and input?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradcheck_dist.verify.attached import Attached
from gradcheck_dist.verify.calls import Call
from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.exchange import Exchange
from gradcheck_dist.verify.function import Function
from gradcheck_dist.verify.inner import Base
from gradcheck_dist.verify.measure import Measured
from gradcheck_dist.verify.pieces import fingerprint, is_distributed, local, sample
from gradcheck_dist.verify.replay import FAITHFUL
from gradcheck_dist.verify.result import ATTACHED, Result
from gradcheck_dist.verify.targets import WHOLE, Target, targets_of
from gradcheck_dist.verify.twin import NotVerifiableError, Twin


def check(
    twin: Twin, root: RootCall, call: Call, called: Sequence[str], exchange: Exchange, *, expects: bool = False
) -> list[Result]:
    """Check a module's own parameters, the inputs that require a gradient, and the parameters of the modules below,
    by child. All ranks of `exchange` check the same modules in the same order. `expects`: see Measured."""
    try:
        function, base = _prepare(twin, root, call)
        problem = None if _replays(twin, root, call) else "run once more alone, it gives another output"
    except NotVerifiableError as error:
        function, base, problem = None, None, str(error)
    except Exception as error:  # the user's module may raise anything
        function, base, problem = None, None, f"run once more alone, it raises {type(error).__name__}: {error}"[:300]
    told = exchange.gather(call.path, _facts(function, base, problem))
    problems = [fact["problem"] for fact in told if fact["problem"]]
    if len({fact.get("dtype") for fact in told}) > 1:
        problems.append("it does not run in the same dtype on every rank")
    if problems or function is None or base is None:
        return [Result(call.path, WHOLE, "undetermined", reason=problems[0])]
    targets = targets_of(function, twin, called)
    results = Measured(function, base, exchange, told, expects=expects).results(targets)
    if any(fact["added"] for fact in told):
        results += _check_attached(function, base, exchange.tagged("attached"), targets)
    return results


def _check_attached(function: Function, base: Base, exchange: Exchange, targets: list[Target]) -> list[Result]:
    """The losses that functions inside put into backward; a part of the gradient that no output shows."""
    attached, values = function.attached(), None
    if attached is not None:
        values = attached.base(base)
    told = exchange.gather(function.call.path, _facts(attached, values, None))
    if attached is None or values is None or len({len(fact.get("outputs", ())) for fact in told}) > 1:
        reason = "what its backward adds to zeros comes from no function with plain tensors, or not on every rank"
        return [Result(function.call.path, Target("attached", "", ()), "undetermined", reason=reason)]
    results = Measured(attached, values, exchange, told).results(targets)
    reached = [result for result in results if result.outcome != "zero"]  # such a loss depends on few variables
    return [replace(result, reason=result.reason or ATTACHED) for result in reached]


def _prepare(twin: Twin, root: RootCall, call: Call) -> tuple[Function, Base]:
    """The call in the finest dtype that it runs in, and what it gives there."""
    problem: Exception | None = None
    for dtype in (torch.float64, torch.float32, None):
        function = Function(twin, root, call, dtype)
        try:
            return function, function.base()
        except Exception as error:
            problem = error
    assert problem is not None
    raise problem


def _replays(twin: Twin, root: RootCall, call: Call) -> bool:
    """Whether the module alone gives what it gave in the whole."""
    with Function(twin, root, call, None).run({}) as outputs:
        for output, seen in zip(outputs, call.outputs, strict=True):
            values = sample(output)
            allowed = FAITHFUL * torch.finfo(output.dtype).eps * float(seen.values.norm())
            if values.shape != seen.values.shape or not float((values - seen.values).norm()) <= allowed:
                return False
        return True


def _facts(function: Function | Attached | None, base: Base | None, problem: str | None) -> dict[str, Any]:
    """What the ranks must know of each other before they go on: who holds the same, and how coarse it is."""
    if function is None or base is None:
        return {"problem": problem}
    pairs = zip(base.outputs, function.cotangents, strict=True)
    return {
        "problem": problem,
        "dtype": str(function.dtype),
        "epsilon": base.epsilon,
        "added": any(grad is not None and bool(local(grad).any()) for grad in base.added.values()),
        "variables": {key: fingerprint(value) for key, value in function.variables.items()},
        "outputs": [
            None if cotangent is None or is_distributed(output) else [fingerprint(output), fingerprint(cotangent)]
            for output, cotangent in pairs
        ],
    }
