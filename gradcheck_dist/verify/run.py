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
from dataclasses import replace
from typing import Any

from torch import nn

from gradcheck_dist.events import GradientCheck, NotChecked, Site
from gradcheck_dist.verify.boundaries import compare_boundaries
from gradcheck_dist.verify.capture import Capture, RootCall, holds_parameters
from gradcheck_dist.verify.exchange import Exchange, OutOfStepError, connected
from gradcheck_dist.verify.modules import Emit, Skip, check_modules
from gradcheck_dist.verify.outside import check_outside
from gradcheck_dist.verify.preserve import inner_module, preserved, unwrapped
from gradcheck_dist.verify.replay import Replay, replay
from gradcheck_dist.verify.result import FunctionAt, Result, Skipped
from gradcheck_dist.verify.tape import Tape
from gradcheck_dist.verify.targets import WHOLE
from gradcheck_dist.verify.twin import NotVerifiableError, Twin
from gradcheck_dist.wording import plural

_counter = itertools.count()
NOT_MET = "declared as meant, but nothing of this name differs from its derivative"
FURTHER = "one forward pass of it is replayed, the others of the step (microbatches) are not"


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
                    _verify_root(call, world, f"{index}", emit, functools.partial(_skip, recorder, call))
            except NotVerifiableError as error:
                emit(Result("", WHOLE, "undetermined", reason=str(error)))

        def tell(call: RootCall, result: Result) -> None:
            _emit(recorder, call.module, result)

        for call in calls:
            if call.further:
                _skip(recorder, call, Skipped("", "forward", str(call.further), FURTHER))
        compare_boundaries(calls, world, tell)
        check_outside(tape, calls, world, tell, bool(wrong_code))
        for name in (name for name, met in recorder.meant.items() if not met):
            recorder.emit(NotChecked, module=name, what="meant", reason=NOT_MET)
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
                f"gradcheck: verifying {plural(count, 'module')} by central differences; training goes on after it\n"
            )


def _verify_root(call: RootCall, world: Exchange, tag: str, emit: Emit, skip: Skip) -> None:
    """Check one outermost call.

    Raises:
        NotVerifiableError: it cannot be replayed, here or on a rank that it communicates with.
        OutOfStepError: another rank did not come.
    """
    problem, twin, played = "", None, None
    with contextlib.ExitStack() as stack:
        try:
            twin = Twin(call.module, call.buffers, call.frozen)
            stack.enter_context(unwrapped(twin.root))
            played = replay(call, twin)
        except NotVerifiableError as error:
            problem = str(error)
        except Exception as error:  # the user's module may raise anything
            problem = f"run once more, it raises {type(error).__name__}: {error}"[:300]
        group, problems = _agree(world, tag, played, problem)
        if problem or problems or twin is None or played is None:
            raise NotVerifiableError(problem or problems[0])
        check_modules(twin, call, played, group.tagged(tag), emit, skip)


def _agree(world: Exchange, tag: str, played: Replay | None, problem: str) -> tuple[Exchange, list[str]]:
    """The ranks that a replay communicates with, and what went wrong there."""
    told = world.gather(f"{tag}/replayed", [sorted(played.ranks) if played else [], problem])
    group = world.of(connected(world.rank, [ranks for ranks, _ in told]))
    return group, [told[rank][1] for rank in group.ranks if told[rank][1]]


def _emit_of(recorder: Any, call: RootCall, wrong_code: list[RootCall], result: Result) -> None:
    if result.outcome == "wrong" and not holds_parameters(call.module):
        wrong_code.append(call)
    _emit(recorder, call.module, result)


def _emit(recorder: Any, root: nn.Module, result: Result) -> None:
    module = root
    while (inner := inner_module(module)) is not None:
        module = inner
    name = type(module).__name__
    first = next(iter(result.functions), None)
    if first is not None and result.at_their_word:
        result = replace(result, shape=first.shape, factor=first.factor)
    with contextlib.suppress(AttributeError):
        module = module.get_submodule(result.path)
    recorder.emit(
        GradientCheck,
        site=result.site or (first.called_at if first is not None else None) or _site(module),
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
        call=result.call,
        num_calls=result.num_calls,
        function=first.name if first is not None else "",
        defined_at=first.defined_at if first is not None else None,
        called_at=first.called_at if first is not None else None,
        hands_on=first is not None and first.hands_on,
        at_its_word=first is not None and result.at_their_word,
        meant=result.outcome == "wrong" and _is_meant(recorder, module, result, first),
    )


def _is_meant(recorder: Any, module: nn.Module, result: Result, function: FunctionAt | None) -> bool:
    names = {result.path, type(module).__name__, function.name if function is not None else ""} - {""}
    met = names & recorder.meant.keys()
    recorder.meant.update(dict.fromkeys(met, True))
    return bool(met)


def _skip(recorder: Any, call: RootCall, skipped: Skipped) -> None:
    name = skipped.path or type(call.root).__name__
    recorder.emit(NotChecked, module=name, what=skipped.what, name=skipped.name, reason=skipped.reason)


def _site(module: nn.Module) -> Site | None:
    """Where the module's forward is written."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return Site(code.co_filename, code.co_firstlineno, code.co_qualname) if code is not None else None
