"""The loss outside of modules: does backward bring to the modules' outputs the derivative of what was computed of them?

What is between (a loss function, a gather over ranks, a custom autograd function) was taken down operation by operation
and is run again on other outputs. Ranks that communicate there are checked as one function.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from gradcheck_dist.function_apply import as_function
from gradcheck_dist.verify import place
from gradcheck_dist.verify.attached import nodes_behind
from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.exchange import Exchange, connected
from gradcheck_dist.verify.inner import Base, Terms
from gradcheck_dist.verify.measure import Measured
from gradcheck_dist.verify.observe import epsilon_of, ranks_of
from gradcheck_dist.verify.pieces import cast, fingerprint
from gradcheck_dist.verify.preserve import set_random_state
from gradcheck_dist.verify.replay import FAITHFUL
from gradcheck_dist.verify.result import BENT, INSIDE, Result
from gradcheck_dist.verify.tape import Entry, Tape, cast_tree, communicates, needed, tensors_in
from gradcheck_dist.verify.targets import Target
from gradcheck_dist.verify.twin import NotVerifiableError


@dataclass(frozen=True)
class End:
    """An output of a module, where the code outside begins: its tensor in training, its value, what arrived there."""

    call: RootCall
    tensor: Tensor
    value: Tensor
    gradient: Tensor


Ends = dict[str, End]
_OWN = ("gradcheck_dist.probes", "gradcheck_dist.verify")
WHOLE = Target("outside", "", ())


class Outside(Terms):
    """The loss as a function of the outputs of modules, in one dtype (None: training's own)."""

    def __init__(self, tape: Tape, entries: list[Entry], ends: Ends, dtype: torch.dtype | None) -> None:
        assert tape.root is not None
        self.dtype = dtype
        self._tape, self._entries = tape, entries
        self._ids = {key: id(end.tensor) for key, end in ends.items()}
        self.variables = {key: cast(end.value, dtype) for key, end in ends.items()}
        self.cotangents: list[Tensor | None] = [torch.ones_like(tape.root.detach(), dtype=torch.float64)]
        self.share = [1.0]

    @property
    def path(self) -> str:
        return ""

    @contextlib.contextmanager
    def terms(self, variables: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
        values = {self._ids[key]: variables.get(key, own).clone() for key, own in self.variables.items()}
        with self.within() if self.within is not None else contextlib.nullcontext():
            for entry in self._entries:
                self._run(entry, values)
        root = self._tape.root
        assert root is not None
        yield [values[id(root)].detach()]

    def _run(self, entry: Entry, values: dict[int, Tensor]) -> None:
        def given(tensor: Tensor) -> Tensor:
            if id(tensor) not in values:
                first = self._tape.constants.get(id(tensor), tensor)
                values[id(tensor)] = cast(first.detach().clone(), self.dtype)
            return values[id(tensor)]

        args, kwargs = tree_map_only(Tensor, given, (entry.args, cast_tree(entry.kwargs, self.dtype)))
        if entry.random is not None:
            set_random_state(entry.random)
        place.standing_at = entry.site
        try:
            with torch.set_grad_enabled(entry.with_gradient):
                run = as_function if entry.in_function else _plainly
                result = run(lambda: entry.func(*args, **kwargs))
        finally:
            place.standing_at = None
        for part in tree_flatten(result)[0]:
            if isinstance(part, torch.ScriptObject) and communicates(entry):
                dist.Work.unbox(part).wait()  # type: ignore[attr-defined]
        for old, new in zip(tensors_in(entry.result), tensors_in(result), strict=True):
            values[id(old)] = new


def _plainly(run: Callable[[], Any]) -> Any:
    return run()


def check_outside(tape: Tape, calls: list[RootCall], world: Exchange, emit: Any, known: bool) -> None:
    """Check what was recorded, on all ranks in step. `emit` is given a call and a result. `known`: a module without
    parameters, which was recorded too, has been found wrong.

    Raises:
        OutOfStepError: another rank did not come.
    """
    ends = _ends(calls)
    problem, entries = tape.problem, list[Entry]()
    if not problem and tape.root is not None and ends:
        entries = needed(tape, [end.tensor for end in ends.values()])
    speaking = [entry for entry in entries if communicates(entry)]
    ranks = sorted({rank for entry in speaking for rank in ranks_of((*entry.args, *entry.kwargs.values()))})
    spoken = [[str(entry.func), [list(tensor.shape) for tensor in entry.read()]] for entry in speaking]
    told = world.gather("outside", [ranks, spoken, problem, bool(entries)])
    group = world.of(connected(world.rank, [one[0] for one in told])).tagged("outside")
    of_group = [told[world.ranks.index(rank)] for rank in group.ranks]
    problems = [one[2] for one in of_group if one[2]]
    if not problems and any(one[1] != of_group[0][1] for one in of_group):
        problems = ["the ranks do not communicate alike there"]
    if not problems and not all(one[3] for one in of_group):
        return
    if problems:
        if ends or tape.entries:
            _undetermined(calls, problems[0], emit)
        return
    function, base, problem = _prepared(tape, entries, ends)
    facts: dict[str, Any] = {"problem": problem}
    if function is not None and base is not None:
        facts |= {
            "dtype": str(function.dtype),
            "epsilon": base.epsilon,
            "variables": {key: fingerprint(value) for key, value in function.variables.items()},
            "outputs": [[fingerprint(base.outputs[0]), fingerprint(torch.ones(1, device="cpu"))]],
        }
    shared = group.gather("facts", facts)
    problems = [fact["problem"] for fact in shared if fact["problem"]]
    if len({(fact.get("dtype"), len(fact.get("variables", ()))) for fact in shared}) > 1:
        problems.append("it does not run alike on every rank")
    if problems or function is None or base is None:
        _undetermined(calls, problems[0], emit)
        return
    measured = Measured(function, base, group, shared)
    hooked = any(group.gather("hooks", _hooked(tape)))
    targets = [Target("outside", key.partition(" ")[2], (key,)) for key in function.variables]
    for target, result in zip(targets, measured.results(targets), strict=True):
        told_of = _told(result, tape, hooked)
        if told_of.outcome == "wrong" and known:
            told_of = replace(told_of, outcome="undetermined", reason=INSIDE)
        emit(ends[target.keys[0]].call, told_of)


def _ends(calls: list[RootCall]) -> Ends:
    """Where the code outside begins. An output that another one is made of is left out: what arrives at it comes from
    inside of the module too."""
    ends: Ends = {}
    for index, call in enumerate(calls):
        outputs = [output for output in call.outputs if output.gradient is not None and output.tensor is not None]
        nodes = {id(output.tensor): output.tensor.grad_fn for output in outputs if output.tensor is not None}
        for output in outputs:
            if output.tensor is None or output.whole is None or output.gradient is None:
                continue
            others = [
                other.tensor for other in outputs if other.tensor is not None and other.tensor is not output.tensor
            ]
            node = nodes.pop(id(output.tensor), None)  # each tensor once, under its first name
            if node is not None and not any(node is behind for behind in nodes_behind(others)):
                ends[f"{index} {output.name}"] = End(call, output.tensor, output.whole, output.gradient)
    return ends


def _told(result: Result, tape: Tape, hooked: bool) -> Result:
    if result.outcome == "wrong" and hooked and result.shape not in ("stopped", "apart"):
        return replace(result, outcome="undetermined", shape="", factor=None, reason=BENT)
    if result.shape == "scaled" and result.factor is not None and result.factor < 0:
        result = replace(result, shape="reversed")
    last = tape.entries[-1].site if tape.entries else None
    return replace(result, path="", site=result.site or last)


def _prepared(tape: Tape, entries: list[Entry], ends: Ends) -> tuple[Outside | None, Base | None, str]:
    """The function in the finest dtype that it runs in and gives training's loss in."""
    assert tape.root is not None
    epsilon = max(epsilon_of(end.value.dtype, end.value.device) for end in ends.values())
    epsilon = max(epsilon, epsilon_of(tape.root.dtype, tape.root.device))
    problem = ""
    for dtype in (torch.float64, None):
        function = Outside(tape, entries, ends, dtype)
        try:
            with function.terms({}) as (value,):
                if abs(float(value) - float(tape.loss)) > FAITHFUL * epsilon * max(abs(float(tape.loss)), 1e-3):
                    raise NotVerifiableError("run once more, the code outside of modules gives another loss")
            gradient: dict[str, Tensor | None] = {key: cast(end.gradient, torch.float64) for key, end in ends.items()}
            return function, Base([value], gradient, dict.fromkeys(gradient), epsilon, _speaks(entries)), ""
        except NotVerifiableError as error:
            problem = str(error)
        except Exception as error:  # operations of the user's may raise anything
            problem = f"run once more, the code outside of modules raises {type(error).__name__}: {error}"[:300]
    return None, None, problem


def _speaks(entries: list[Entry]) -> Any:
    return next((entry.site for entry in entries if communicates(entry)), None)


def _hooked(tape: Tape) -> bool:
    """Whether the user hooks a tensor outside of modules: what a hook does is not seen here."""
    made = [tensor for entry in tape.entries for tensor in tensors_in(entry.result) if tensor.grad_fn is not None]
    return any(not _is_own(hook) for tensor in made for hook in (tensor._backward_hooks or {}).values())


def _is_own(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OWN)


def _undetermined(calls: list[RootCall], reason: str, emit: Any) -> None:
    for call in calls[:1]:
        emit(call, Result("", WHOLE, "undetermined", reason=reason))
