"""One module: does its backward give the derivative of its forward, for every parameter and input?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.exchange import Exchange
from gradcheck_dist.verify.function import Base, Function
from gradcheck_dist.verify.measure import Measured
from gradcheck_dist.verify.pieces import fingerprint, is_distributed, sample
from gradcheck_dist.verify.replay import FAITHFUL, Call
from gradcheck_dist.verify.result import Result
from gradcheck_dist.verify.targets import Target, targets_of
from gradcheck_dist.verify.twin import NotVerifiableError, Twin


def check(twin: Twin, root: RootCall, call: Call, called: Sequence[str], exchange: Exchange) -> list[Result]:
    """Check a module's own parameters, the inputs that require a gradient, and the parameters of the modules below,
    by child. All ranks of `exchange` check the same modules in the same order."""
    whole = Target("module", "", ())
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
        return [Result(call.path, whole, "undetermined", reason=problems[0])]
    return Measured(function, base, exchange, told).results(targets_of(function, twin, called))


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


def _facts(function: Function | None, base: Base | None, problem: str | None) -> dict[str, Any]:
    """What the ranks must know of each other before they go on: who holds the same, and how coarse it is."""
    if function is None or base is None:
        return {"problem": problem}
    pairs = zip(base.outputs, function.cotangents, strict=True)
    return {
        "problem": problem,
        "dtype": str(function.dtype),
        "epsilon": base.epsilon,
        "variables": {key: fingerprint(value) for key, value in function.variables.items()},
        "outputs": [
            None if cotangent is None or is_distributed(output) else [fingerprint(output), fingerprint(cotangent)]
            for output, cotangent in pairs
        ],
    }
