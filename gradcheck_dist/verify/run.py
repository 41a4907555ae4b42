"""The verification of a step: every captured outermost call, module by module, into the trace.

It happens once, before the first optimizer of the step steps, when the parameters are still those of the forward. All
ranks come to it together; what they tell each other goes through the rendezvous store.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from gradcheck_dist.events import GradientCheck, Site
from gradcheck_dist.verify.boundaries import compare_boundaries
from gradcheck_dist.verify.capture import Capture, RootCall, holds_parameters
from gradcheck_dist.verify.check import check
from gradcheck_dist.verify.exchange import Exchange, OutOfStepError, connected
from gradcheck_dist.verify.leaves import compare_leaves
from gradcheck_dist.verify.outside import check_outside
from gradcheck_dist.verify.pieces import same
from gradcheck_dist.verify.preserve import inner_module, preserved, unwrapped
from gradcheck_dist.verify.replay import Replay, replay
from gradcheck_dist.verify.result import ARRIVED, INSIDE, Result
from gradcheck_dist.verify.tape import Tape
from gradcheck_dist.verify.targets import Target
from gradcheck_dist.verify.twin import NotVerifiableError, Twin

Emit = Callable[[Result], None]
_counter = itertools.count()
WHOLE = Target("module", "", ())


def install(recorder: Any, patches: Any) -> None:
    """Put the capture in place: the first step that is recorded is verified."""
    Capture(recorder, patches, verify)


def verify(recorder: Any, calls: list[RootCall], tape: Tape) -> None:
    """Check what was captured, on all ranks in step, and write the outcomes as events."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    world = Exchange.of_world(f"{restart}/{next(_counter)}")
    recorder.suspended += 1
    start = time.perf_counter_ns()
    wrong_code: list[RootCall] = []
    _say(world, calls)
    try:
        # Making twins and replaying them may communicate, so nobody begins before all are here.
        rounds = max(world.gather("calls", len(calls)))
        for index in range(rounds):
            call = calls[index] if index < len(calls) else None
            if call is None:
                _agree(world, f"{index}", None, "")
                continue
            emit = functools.partial(_emit_of, recorder, call, wrong_code)
            try:
                with preserved(call.module), warnings.catch_warnings(action="ignore"):  # training has said it already
                    _verify_root(call, world, f"{index}", emit)
            except NotVerifiableError as error:
                emit(Result("", WHOLE, "undetermined", reason=str(error)))

        def tell(call: RootCall, result: Result) -> None:
            _emit(recorder, call.module, result)

        compare_boundaries(calls, world, tell)
        check_outside(tape, calls, world, tell, bool(wrong_code))
    except OutOfStepError as error:
        for call in calls:
            _emit(recorder, call.module, Result("", WHOLE, "undetermined", reason=str(error)))
    finally:
        recorder.suspended -= 1
        recorder.probe_ns += time.perf_counter_ns() - start


def _say(world: Exchange, calls: list[RootCall]) -> None:
    """One line on stderr: training stands still for as long as this takes."""
    count = sum(1 for call in calls for _ in call.module.modules())
    if world.rank == world.ranks[0] and count:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(
                f"gradcheck: verifying {count} modules by central differences; training goes on after it\n"
            )


def _verify_root(call: RootCall, world: Exchange, tag: str, emit: Emit) -> None:
    """Check one outermost call.

    Raises:
        NotVerifiableError: it cannot be replayed, here or on a rank that it communicates with.
        OutOfStepError: another rank did not come.
    """
    problem, twin, played = "", None, None
    with contextlib.ExitStack() as stack:
        try:
            twin = Twin(call.module, call.buffers)
            stack.enter_context(unwrapped(twin.root))
            played = replay(call, twin)
        except NotVerifiableError as error:
            problem = str(error)
        except Exception as error:  # the user's module may raise anything
            problem = f"run once more, it raises {type(error).__name__}: {error}"[:300]
        group, problems = _agree(world, tag, played, problem)
        if problem or problems or twin is None or played is None:
            raise NotVerifiableError(problem or problems[0])
        _check_modules(twin, call, played, group.tagged(tag), emit)


def _agree(world: Exchange, tag: str, played: Replay | None, problem: str) -> tuple[Exchange, list[str]]:
    """The ranks that a replay communicates with, and what went wrong there."""
    told = world.gather(f"{tag}/replayed", [sorted(played.ranks) if played else [], problem])
    group = world.of(connected(world.rank, [ranks for ranks, _ in told]))
    return group, [told[rank][1] for rank in group.ranks if told[rank][1]]


def _check_modules(twin: Twin, call: RootCall, played: Replay, group: Exchange, emit: Emit) -> None:
    results: list[Result] = []
    wrong: set[str] = set()
    stopped: set[str] = set()  # told once, where they are written; what is around them is right as they are
    try:
        for path in reversed(list(played.calls)):  # children before their parents
            if any(not path or below.startswith(f"{path}.") for below in wrong):
                results.append(Result(path, WHOLE, "undetermined", reason=INSIDE))
                continue
            known = played.calls[path]
            if path and not any(output.requires_grad for output in known.outputs):
                continue  # gives nothing that could get a gradient
            found = check(twin, call, known, list(played.calls), group)
            if any(result.outcome == "wrong" and not result.stopped for result in found):
                wrong.add(path)
            if any(below.startswith(f"{path}." if path else "") for below in stopped):
                found = [replace(one, outcome="right") if one.stopped else one for one in found]
            elif any(result.stopped for result in found):
                stopped.add(path)
            results += found
        results = _blame_unsummed(results)
        if not wrong:
            results += compare_leaves(call, played)
    finally:
        for result in results:
            emit(result)


def _blame_unsummed(results: list[Result]) -> list[Result]:
    """Where a module's gradients arrive torn apart between ranks, the sum is missing in the module that its output
    went into, if that is entered with whole gradients and left with summands. What is wrong around it follows from it.
    """
    torn = [seen for result in results if result.reason == ARRIVED for seen in result.seen]
    for index, result in enumerate(results):
        if result.left_unsummed and any(same(result.seen[0], output) for output in torn):
            around = [other.path for other in results if other.outcome == "wrong"]
            if all(not path or result.path.startswith(f"{path}.") for path in around):
                results = [other for other in results if other.outcome != "wrong"]
                results.insert(index, replace(result, outcome="wrong"))
                results += [Result(path, WHOLE, "undetermined", reason=INSIDE) for path in dict.fromkeys(around)]
                return results
    return results


def _emit_of(recorder: Any, call: RootCall, wrong_code: list[RootCall], result: Result) -> None:
    if result.outcome == "wrong" and not holds_parameters(call.module):
        wrong_code.append(call)
    _emit(recorder, call.module, result)


def _emit(recorder: Any, root: nn.Module, result: Result) -> None:
    module = root
    while (inner := inner_module(module)) is not None:
        module = inner
    name = type(module).__name__
    with contextlib.suppress(AttributeError):
        module = module.get_submodule(result.path)
    recorder.emit(
        GradientCheck,
        site=result.site or _site(module),
        module=result.path or name,
        module_type=type(module).__name__,
        target=result.target.kind,
        name=result.target.name,
        outcome=result.outcome,
        shape=result.shape,
        observed=result.observed,
        numerical=result.numerical,
        error=result.error,
        factor=result.factor,
        precision=result.precision,
        group=result.ranks,
        reason=result.reason,
    )


def _site(module: nn.Module) -> Site | None:
    """Where the module's forward is written."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return Site(code.co_filename, code.co_firstlineno, code.co_qualname) if code is not None else None
