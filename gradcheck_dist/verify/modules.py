"""The calls of a replay, checked from the innermost outwards; what was not checked is told with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gradcheck_dist.verify.calls import Call, Calls
from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.check import check
from gradcheck_dist.verify.exchange import Exchange
from gradcheck_dist.verify.leaves import compare_leaves
from gradcheck_dist.verify.pieces import same
from gradcheck_dist.verify.replay import Replay
from gradcheck_dist.verify.result import ARRIVED, INSIDE, Result, Skipped
from gradcheck_dist.verify.targets import WHOLE
from gradcheck_dist.verify.twin import Twin

Emit = Callable[[Result], None]
Skip = Callable[[Skipped], None]
NO_USE = "nothing that is computed in this pass depends on it"
UNLIKE = "not every rank that it communicates with calls it as often"


def check_modules(twin: Twin, call: RootCall, played: Replay, group: Exchange, emit: Emit, skip: Skip) -> None:
    """Check every call that was kept, on all ranks of `group` in step, and tell what else there is.

    Raises:
        OutOfStepError: another rank did not come.
    """
    results: list[Result] = []
    wrong: set[Call] = set()  # calls with a wrong one inside
    known_inside: set[Call] = set()  # what differs on purpose in there, or by its line, is told once
    told: set[object] = set()
    calls = played.calls
    everywhere = set.intersection(*map(set, group.gather("calls", [known.label for known in calls.kept])))
    try:
        for known in reversed(calls.kept):  # children before their parents
            if known.label not in everywhere:
                results.append(Result(known.path, WHOLE, "undetermined", reason=UNLIKE))
            elif known in wrong:
                results.append(Result(known.path, WHOLE, "undetermined", reason=INSIDE))
            elif known.gives_gradients or not known.path:
                tagged, expects = group.tagged(str(known.index)), known in known_inside
                found = check(twin, call, known, list(calls.counts), tagged, expects=expects)
                found = [each for one in found for each in _each_function(_untold(one, told))]
                if any(result.outcome == "wrong" and not result.explained for result in found):
                    wrong.update((known, *known.ancestors()))
                if expects:
                    found = [replace(one, outcome="right") if one.stopped else one for one in found]
                if any(result.explained for result in found):
                    known_inside.update(known.ancestors())
                told |= {function.key for one in found for function in one.functions}
                results += [replace(one, call=known.index, num_calls=calls.counts[known.path]) for one in found]
        results = _blame_redrawn(_blame_unsummed(results), calls)
        if not wrong:
            results += compare_leaves(call, played)
    finally:
        for result in results:
            emit(result)
        for left_out in [*_skipped(twin, calls), *_unreached(twin, results)]:
            skip(left_out)


def _untold(result: Result, told: set[object]) -> Result:
    """Without the functions that a module inside was named for; right where nothing else is left."""
    functions = tuple(one for one in result.functions if one.key not in told)
    if result.at_their_word and not functions:
        return replace(result, outcome="right", functions=())
    return replace(result, functions=functions or result.functions)


def _each_function(result: Result) -> list[Result]:
    return [replace(result, functions=(one,)) for one in result.functions] or [result]


def _skipped(twin: Twin, calls: Calls) -> Iterator[Skipped]:
    """Modules with trained parameters, or calls of such, that were not checked by themselves."""
    checked = {call.path for call in calls.kept if call.gives_gradients or not call.path}
    for path, module in twin.root.named_modules():
        if path in checked:
            if missing := calls.missing(path):
                yield Skipped(path, "calls", missing, "so many calls of one module are checked with what is around it")
        elif any(param.requires_grad for param in module.parameters(recurse=False)):
            if path in calls.counts:
                reason = "it gives nothing that could get a gradient"
            elif path in calls.quiet:
                reason = "it is called without gradients alone"
            else:
                reason = "it is not called by itself in this pass; its parameters are checked with what is around it"
            yield Skipped(path, "module", "", reason)


def _unreached(twin: Twin, results: list[Result]) -> Iterator[Skipped]:
    """Trained parameters that no decided check was about."""
    for name in sorted(twin.trained):
        of_value = [one for one in results if any(twin.values[key] is twin.values[name] for key in _keys(twin, one))]
        closest = min(of_value, key=lambda one: (len(one.target.keys), one.outcome == "zero"), default=None)
        if closest is None or not any(one.outcome in ("right", "wrong") for one in of_value):
            reason = closest.reason if closest is not None else "no check is about it"
        elif closest.outcome == "zero":  # what it is checked together with was decided by the others
            reason = NO_USE
        else:
            continue
        owner, _, own = name.rpartition(".")
        yield Skipped(owner, "parameter", own, reason or NO_USE)


def _keys(twin: Twin, result: Result) -> Iterator[str]:
    return (key for key in result.target.keys if key in twin.values)


def _blame_redrawn(results: list[Result], calls: Calls) -> list[Result]:
    """Where a region draws other random numbers when it is run again in backward, what is wrong around it follows."""
    inside: dict[str, list[str]] = {}
    for path, parent in calls.redrawn:
        for around in () if parent is None else (parent, *parent.ancestors()):
            inside.setdefault(around.path, []).append(path)
    found = [one for one in results if one.outcome == "wrong" and not one.stopped and one.path in inside]
    if not found:
        return results
    culprits = dict.fromkeys(path for one in found for path in inside[one.path])
    return [
        *[one for one in results if one not in found],
        *[replace(found[0], path=path, target=WHOLE, shape="redrawn", factor=None, reason="") for path in culprits],
        *[Result(path, WHOLE, "undetermined", reason=INSIDE) for path in dict.fromkeys(one.path for one in found)],
    ]


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
