"""The program's hooks on activations, and its functions that hand on what they are given: what they multiply gradients
by on the way from the losses to the parameters.

An engine may divide by accumulation steps where its outputs get their gradient (DeepSpeed, runtime/engine.py,
`_backward_prologue_per_tensor`). Such a number weighs tokens as one before the loss does, behind the place where that
weight is read, so events that tell of the weight wait until the hooks have run. What acts on a part of the ways alone
(experts, whose gradients are sums over ranks already; a branch whose gradient is reversed) belongs to the model, and is
told as a function that hands its input on is: it may make up for what is wrong elsewhere.

What is kept for a pass names hooks on tensors by numbers that stand in the metadata of the nodes they act on: a hook
that held on to its node would keep the whole graph alive. Those of modules act in a node of their own
(torch.utils.hooks.BackwardHook), which is watched from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import BackwardHook, unserializable_hook

from gradcheck_dist.events import Site
from gradcheck_dist.probes.activations import exchange_events
from gradcheck_dist.probes.activations.exchange_calls import Calls
from gradcheck_dist.probes.activations.exchange_layout import WHOLE, one_to_one, take
from gradcheck_dist.probes.activations.ways import (
    FEW,
    OF_MODULE,
    Edge,
    PassHooks,
    multiple,
    some_of,
    ways_behind,
)
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.marks import hands_on, mark_hands_on, mark_hooked
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.sites import caller_site, defined_at


def install(recorder: Recorder, patches: Patches) -> None:
    hooks = recorder.activation_hooks = Hooks(recorder)
    patches.replace(Tensor, "register_hook", hooks.watching)

    def begin(recorder: Recorder, current: BackwardPass, roots: Sequence[Root], has_gradients: bool) -> None:
        if hooks.num_watched or hooks.of_nodes:
            look(recorder, current, roots)

    def made(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def setup(self: Any, args: Any) -> Any:
            hooks.of_nodes = True
            return original(self, args)

        return setup

    patches.replace(BackwardHook, "setup_output_hook", made)
    autograd.OPEN_LISTENERS.append(begin)
    autograd.CLOSE_LISTENERS.append(all_ran)
    patches.on_restore(lambda: setattr(recorder, "activation_hooks", None))
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(all_ran))


class Branch(NamedTuple):
    """What is told of a hook on a part of the ways, as of a function that hands its input on, and elements of that."""

    told: exchange_events.Watched
    values: Tensor


class OwnHook(NamedTuple):
    """A hook of the program's, and where it was put."""

    number: int
    site: Site | None
    branch: Branch | None


class Before(NamedTuple):
    """Elements of the gradient that a hook is about to get, and its version."""

    version: int
    on_all_ways: Tensor | None
    beside: Tensor | None


class Hooks:
    """Those that the program puts on activations. The number of one is how many there were before it."""

    def __init__(self, recorder: Recorder) -> None:
        self.num_watched = 0
        self.of_nodes = False
        self._recorder = recorder

    def watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            if torch.compiler.is_compiling() or tensor.grad_fn is None:
                return original(tensor, hook)
            return original(tensor, watched(self._recorder, self, tensor, hook) or hook)

        return register_hook


@guarded("activation_hooks")
def watched(recorder: Recorder, hooks: Hooks, tensor: Tensor, hook: Callable[..., Any]) -> Callable[..., Any] | None:
    """A hook in the place of the program's that does the same; None for one of torch's or of the probes'."""
    if not _is_the_programs(hook):
        return None
    own = OwnHook(hooks.num_watched, caller_site(), branch_of(recorder, tensor, hook))

    @functools.wraps(hook, updated=())
    def call(grad: Tensor) -> Any:
        before = comes(recorder, own, grad)
        result = hook(grad)
        if before is not None:
            ran(recorder, own, before, grad, result)
        return result

    call.is_watched = True  # type: ignore[attr-defined]  # a subclass of Tensor hands it on to this function again
    mark_hooked(tensor, own.number)
    hooks.num_watched += 1
    return call


def _is_the_programs(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    if getattr(hook, "is_watched", False):
        return False
    return not (getattr(hook, "__module__", None) or "").startswith(("torch.", "gradcheck_dist."))


@guarded("activation_hooks")
def applied(recorder: Recorder, cls: type[Function], args: tuple[Any, ...], results: Any, calls: Calls) -> None:
    """A function of the program's was applied: note whether it gave what it was given. Runs behind every function: kept
    short."""
    hooks: Hooks | None = recorder.activation_hooks
    if hooks is None or calls or calls.sent or cls.__module__.startswith("torch."):
        return
    pair = one_to_one(args, results)
    if pair is None or pair[0].is_leaf or pair[1].grad_fn is None or pair[0].dtype != pair[1].dtype:
        return
    given, made = pair
    same: bool | Tensor = made.data_ptr() == given.data_ptr()
    if not same:
        same = (some_of(made, FEW) == some_of(given, FEW)).all()
        same = bool(same) if made.is_cpu else same
    if same is not False:
        hooks.of_nodes = True
        mark_hands_on(made, same)


@guarded("activation_hooks")
def look(recorder: Recorder, current: BackwardPass, roots: Sequence[Root]) -> None:
    ways = ways_behind(roots if recorder.recording else ())
    current.hooks = PassHooks(ways) if ways.stops else None
    for edge in ways.edges:
        node, output = edge
        if node.name() == OF_MODULE:
            watch_node(recorder, current, edge, output, None, True)
        elif (same := hands_on(node)) is not None:
            (place,) = (place for place, (behind, _) in enumerate(node.next_functions) if behind is not None)
            watch_node(recorder, current, edge, place, type(node)._forward_cls, same)


def watch_node(
    recorder: Recorder, current: BackwardPass, edge: Edge, place: int, cls: Any, same: bool | Tensor
) -> None:
    """Hold what leaves a node for one of its inputs, the one at `place`, against what arrives at one of its outputs.
    `cls`: the function whose node it is, and `same` whether it handed on what it was given; None where a module's hooks
    act in it."""
    site = None if cls is None else defined_at(cls.backward)
    node, output = edge
    arrived: list[tuple[Tensor, int, Tensor]] = []

    def comes(grads: Sequence[Tensor | None]) -> None:
        if (grad := grads[output]) is not None:
            arrived.append((grad, grad._version, some_of(grad)))

    def leaves(left: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
        if arrived and recorder.current is current and current.hooks is not None:
            (grad, version, got), given = arrived.pop(), left[place]
            factor: Tensor | float = 1.0
            changed = given is not None and (given is not grad or grad._version != version)
            if changed and given is not None and not communicates(recorder, cls):
                factor = multiple(got, some_of(given))
                factor = torch.where(same, factor, 1.0) if isinstance(same, Tensor) else factor
            current.hooks.ran(recorder, edge, site, grad, factor)

    for register, hook in ((node.register_prehook, comes), (node.register_hook, leaves)):
        current.handles.append(register(unserializable_hook(kept_away(recorder, "activation_hooks", hook))))


def communicates(recorder: Recorder, cls: Any) -> bool:
    """Whether a function calls a collective in backward: what comes back is not what this rank's gradient is times."""
    return recorder.exchanges is not None and recorder.exchanges.communicates(cls)


def branch_of(recorder: Recorder, tensor: Tensor, hook: Callable[..., Any]) -> Branch | None:
    """What is told of a hook that does not act on all ways; None where exchanges of activations are not looked at."""
    exchanges: Any = recorder.exchanges
    if exchanges is None or not exchanges.listens or not is_plain(tensor) or not tensor.is_floating_point():
        return None
    ranks, written = (dist.get_rank(),), defined_at(hook)
    index = exchanges.number(ranks, written)
    if index is None:
        return None
    values, counts = take([tensor], [WHOLE])
    name = f"the hook {getattr(hook, '__qualname__', type(hook).__name__).rpartition('.')[2]}"
    told = exchange_events.Watched(
        name, ranks, index, counts, counts, (), written, caller_site(), exchange_events.coarsest([tensor])
    )
    return Branch(told, values)


@guarded("activation_hooks")
def comes(recorder: Recorder, own: OwnHook, grad: Tensor) -> Before | None:
    """What a hook is about to get; None where it is not looked at."""
    current = recorder.current
    if current is None or not recorder.recording:
        return None
    on_all_ways = beside = None
    if current.hooks is not None and current.hooks.has(own.number):
        on_all_ways = some_of(grad)
    if own.branch is not None and is_plain(grad) and (current.hooks is None or current.hooks.is_beside(own.number)):
        beside = take([grad], [WHOLE])[0]
    return None if on_all_ways is beside is None else Before(grad._version, on_all_ways, beside)


@guarded("activation_hooks")
def ran(recorder: Recorder, own: OwnHook, before: Before, grad: Tensor, result: Any) -> None:
    """A hook gave `result`, None where it gave what it got, into which it may have written."""
    given = grad if result is None else result
    changed = given is not grad or grad._version != before.version
    alike = changed and is_plain(given) and given.shape == grad.shape
    if alike and before.beside is not None and own.branch is not None:
        told, values = own.branch
        gave = take([given], [WHOLE])[0]
        exchange_events.tell(recorder, told, values, values, before.beside, gave, lost=False)
    if before.on_all_ways is not None and recorder.current is not None and recorder.current.hooks is not None:
        factor = multiple(before.on_all_ways, some_of(given)) if changed else 1.0
        recorder.current.hooks.ran(recorder, own.number, own.site, grad, factor)


@guarded("activation_hooks")
def all_ran(recorder: Recorder, current: BackwardPass) -> None:
    if current.hooks is not None:
        current.hooks.close(recorder)
