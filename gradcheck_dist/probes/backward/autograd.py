"""Backward passes and the leaves: each contribution's own gradient as it arrives at a parameter.

A tensor hook on the leaf that returns None leaves the gradient bit for bit as it was. Sources of the semantics:
torch.autograd.graph, torch.nn.modules.module.register_module_forward_pre_hook.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.utils.hooks import unserializable_hook

from gradcheck_dist.events import BEFORE
from gradcheck_dist.probes.backward.forwards import Forwards
from gradcheck_dist.probes.backward.roots import Root, roots_of
from gradcheck_dist.probes.parameters.registry import ParamInfo, originals
from gradcheck_dist.probes.recording import captured, module_calls
from gradcheck_dist.probes.recording.captured import BACKWARD
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.threads import OUTSIDE, graph_task

ROOT_LISTENERS: list[Callable[[Recorder, nn.Module], None]] = []
"""Called with every new root module; other probes use it to find their wrappers inside."""

WRAPPED_LISTENERS: list[Callable[[Recorder, nn.Module], None]] = []
"""Called before its parameters are named: for wrappers whose parameters are no parameters of the model."""


CALL_LISTENERS: list[Callable[[Recorder, nn.Module, Sequence[Any]], None]] = []
"""Called with every module that is called with gradients enabled, until all parameters are known."""

HOOKS_REDUCE = 4
"""Reductions of one gradient, by hooks of the user's before a wrapper's own, that are told."""

OF_GRAD = 2
"""Which positional argument of torch.autograd.grad holds the gradients to start from; of backward it is the second."""


def install(recorder: Recorder, patches: Patches) -> None:
    patches.replace(torch.autograd, "backward", lambda original: _watch(recorder, original, 1))
    patches.replace(torch.autograd, "grad", lambda original: _watch_grad(recorder, original))
    patches.replace(Variable, "_execution_engine", lambda engine: _watched_engine(recorder, type(engine)))
    patches.replace(torch.utils, "swap_tensors", lambda original: _watch_swap(recorder, original))
    captured.install(recorder, patches)
    discovery = Discovery(recorder)
    recorder.discovery = discovery
    discovery.start()
    patches.on_restore(discovery.stop)
    patches.on_restore(discovery.remove_hooks)


def _watch(recorder: Recorder, original: Callable[..., Any], gradients_at: int) -> Callable[..., Any]:
    """`gradients_at`: which positional argument holds the gradients to start from."""

    def backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if recorder.captures.under_way:
            if gradients_at == 1:  # autograd.grad leaves nothing behind
                recorder.captures.holds(BACKWARD)
            return original(*args, **kwargs)
        if any(hasattr(one, "__next__") for one in (*args, *kwargs.values())):
            # Torch makes tuples of iterators (`model.parameters()`), which can be read once.
            args = tuple(tuple(one) if hasattr(one, "__next__") else one for one in args)
            for name in [name for name, one in kwargs.items() if hasattr(one, "__next__")]:
                kwargs[name] = tuple(kwargs[name])
        current = open_pass(recorder)
        if current is not None:
            current.returned = gradients_at == OF_GRAD
        if recorder.current is not None and not recorder.suspended:
            opened(recorder, args, kwargs, gradients_at)
        if current is None:
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            close_pass(recorder, current)

    backward.__wrapped__ = original  # type: ignore[attr-defined]
    backward.__doc__ = original.__doc__
    return backward


def _watched_engine(recorder: Recorder, kind: Any) -> Any:
    """An engine (the C++ one has no state in Python) that sees who starts it without torch.autograd.backward, as
    Megatron's pipelines do for outputs that hold no memory any more."""

    class Engine(kind):  # type: ignore[misc]
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            accumulates = kwargs.get("accumulate_grad", args[6] if len(args) > 6 else False)
            if not accumulates or recorder.suspended:
                return super().run_backward(*args, **kwargs)
            run = functools.partial(counted, super().run_backward)
            return (run if recorder.current is not None else _watch(recorder, run, 1))(*args, **kwargs)

    def counted(run_backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        pass_begins(recorder)
        return run_backward(*args, **kwargs)

    return Engine()


def _watch_swap(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    """Module.to, double and half swap parameters of a tensor subclass, and all where torch is told so."""

    @functools.wraps(original)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        original(t1, t2)
        swapped(recorder, t1, t2)

    return swap_tensors


@guarded("autograd")
def swapped(recorder: Recorder, *tensors: Tensor) -> None:
    for tensor in tensors:
        recorder.discovery.hook_again(tensor)


@guarded("autograd")
def pass_begins(recorder: Recorder) -> None:
    recorder.passes.begun += graph_task() == OUTSIDE


def _watch_grad(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients that are differentiated again (a gradient penalty) belong to the loss and are no contribution yet.

    A backward function that calls this (a checkpoint by hand) is given gradients, which its own results then bring to
    the parameters; they are held until the pass is over, and kept where nothing else arrived.
    """
    watched = _watch(recorder, original, OF_GRAD)

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        create_graph = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        run = original if create_graph else watched
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        current = recorder.current
        if current is None or graph_task() == OUTSIDE:
            return run(*args, **kwargs)
        current.inner += 1
        try:
            return run(*args, **kwargs)
        finally:
            current.inner -= 1

    return grad


@guarded("autograd")
def open_pass(recorder: Recorder) -> Any:
    return recorder.begin_backward()


@guarded("autograd")
def close_pass(recorder: Recorder, current: Any) -> None:
    try:
        for listener in CLOSE_LISTENERS:
            listener(recorder, current)
    finally:
        recorder.end_backward(current)


@guarded("autograd")
def opened(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], gradients_at: int) -> None:
    """Tell from what a backward pass starts."""
    recorder.discovery.thaw()
    given = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
    towards = kwargs.get("inputs", args[1] if len(args) > 1 else ()) if gradients_at == OF_GRAD else ()
    roots = roots_of(given, towards)
    gradients = kwargs.get(
        "grad_tensors", kwargs.get("grad_outputs", args[gradients_at] if len(args) > gradients_at else None)
    )
    current = recorder.current
    assert current is not None
    current.started_from = gradients
    kept = any(
        kwargs.get(name, args[at] if len(args) > at else None)
        for at, name in enumerate(("retain_graph", "create_graph"), gradients_at + 1)
    )
    try:
        for listener in OPEN_LISTENERS:
            listener(recorder, current, roots, _are_given(gradients))
    finally:
        current.started_from = None
    current.first_of_forward = recorder.discovery.forwards.first_of(recorder, roots, kept)


def _are_given(gradients: Any) -> bool:
    """Whether a pass starts from a gradient of the caller's. A list of None is none: a pipeline's last stage, which
    begins at its loss, gives that (torch/distributed/pipelining/_backward.py)."""
    return any(one is not None for one in ([gradients] if isinstance(gradients, Tensor | None) else gradients))


OPEN_LISTENERS: list[Callable[[Recorder, Any, list[Root], bool], None]] = []
"""Called at the begin of a pass with its roots, and whether it starts from gradients that the caller gave."""

CLOSE_LISTENERS: list[Callable[[Recorder, Any], None]] = []
"""Called at the end of a pass, before it is closed: reductions that ran inside it are completed here."""


class Discovery:
    """Finds parameters and hooks their leaves.

    A global forward pre-hook names the parameters below every module that is called and not known yet. It costs a
    microsecond a module call, so it is taken off when every parameter of a stepping optimizer is hooked.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._listening: Callable[[], None] | None = None
        self._hooks: list[Any] = []
        self._own: dict[int, tuple[ParamInfo, Any]] = {}  # by leaf, its parameter and our hook
        self._hooked: set[int] = set()
        self._frozen: list[ParamInfo] = []
        self.forwards = Forwards()
        self._called: set[int] = set()  # modules called with gradients enabled, while the forward hook was in place
        self._asked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: list[ParamInfo] | None = None  # what an optimizer read last, where all of it was watched
        self._again = False  # whether the module that is called next may have got parameters since its last call
        self._later = 0  # regions under way whose gradients are computed when they are run again in backward

    def start(self) -> None:
        if self._listening is None:
            self._called.clear()
            self._listening = module_calls.listen(kept_away(self._recorder, "autograd", self._on_call))

    def look_again(self) -> None:
        """Parameters have come that nobody watches, it may be in modules that are known: the next outermost call names
        all below it once more."""
        self._again = True
        self.start()

    def has_hooked(self, param: Tensor) -> bool:
        return id(param) in self._hooked

    def watches(self, infos: list[ParamInfo]) -> bool:
        """Whether all that an optimizer reads is watched, by names that modules have given it: one without could stand
        for others that no module has shown yet. `infos` is not to be changed later."""
        if infos is self._watched:
            return True
        read = [original for info in infos for original in (originals(info) if info.regions else (info,))]
        unwatched = [info for info in read if not (info.named and self.has_hooked(info.param))]
        if not unwatched:
            self._watched = infos
        return not any(info.param.requires_grad for info in unwatched)

    @contextmanager
    def run_again_later(self) -> Iterator[None]:
        """While open, modules are called that are meant to be trained, though gradients are disabled (a reentrant
        checkpoint's first run)."""
        self._later += 1
        try:
            yield
        finally:
            self._later -= 1

    def called(self, optimizer: Any) -> set[int]:
        """The ids of the parameters whose own module was seen to be called before this step. Once the hook is off, an
        optimizer that steps for the first time (behind another one) is told what was called until then."""
        if self._listening is None and optimizer in self._asked:
            return set()
        self._asked.add(optimizer)
        modules = self._recorder.registry.known_modules
        owners = [modules[key] for key in self._called if key in modules]
        return {id(param) for owner in owners for param in owner._parameters.values() if param is not None}

    def stop(self) -> None:
        if self._listening is not None:
            self._listening()
            self._listening = None

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._own.clear()

    def _on_call(self, module: nn.Module, given: Sequence[Any]) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if torch.is_grad_enabled():
            self._called.add(id(module))
            for listener in CALL_LISTENERS:
                listener(self._recorder, module, given)
        elif self._later:
            self._called.add(id(module))
        known = self._recorder.registry.known_modules
        if (self._again or id(module) not in known) and next(module.parameters(), None) is not None:
            self._again = False
            add_root(self._recorder, module, None)

    def hook(self, info: ParamInfo, leaf: Tensor) -> None:
        """Watch `leaf`, the tensor through which autograd delivers the gradient of a parameter, once."""
        if id(leaf) in self._hooked or not leaf.requires_grad:
            return
        self._hooked.update((id(leaf), id(info.param)))
        handle = leaf.register_hook(unserializable_hook(functools.partial(arrived, self._recorder, info)))
        put_first(leaf, handle.id)
        self._hooks.append(handle)
        self._own[id(leaf)] = info, handle

    def hook_again(self, leaf: Tensor) -> None:
        """A tensor was swapped: its dict of hooks stays, and nothing calls what is in it, or will be, until it is made
        anew. Where the user's are in it, they are as dead without ours, and stay so."""
        own = self._own.get(id(leaf))
        if own is not None and list(leaf._backward_hooks or ()) == [own[1].id]:
            own[1].remove()
            leaf._backward_hooks = None
            self._hooked.discard(id(leaf))
            self._watched = None
            self.hook(own[0], leaf)

    def hook_flat(self, flat: Tensor, infos: list[ParamInfo], on_arrival: Callable[[Tensor], Tensor | None]) -> None:
        """Watch a tensor through which autograd delivers the gradients of several parameters."""
        self._hooked.update(id(info.param) for info in infos)
        if flat.requires_grad:
            handle = flat.register_hook(on_arrival)
            put_first(flat, handle.id)
            self._hooks.append(handle)

    def takes_over(self, leaf: Tensor, stand_in: Tensor) -> None:
        """Another probe tells what arrives at a parameter, which is no contribution."""
        self._hooked.update((id(leaf), id(stand_in)))

    def remember_frozen(self, info: ParamInfo) -> None:
        if not info.param.requires_grad:
            self._frozen.append(info)

    def thaw(self) -> None:
        """Watch parameters that were frozen when they were first seen and are trained now."""
        thawed = [info for info in self._frozen if info.param.requires_grad]
        if thawed:
            self._frozen = [info for info in self._frozen if not info.param.requires_grad]
            for info in thawed:
                self._recorder.registry.write_again(info)
                self.hook(info, info.param)

    def hook_accumulated(self, info: ParamInfo) -> None:
        """Also watch the accumulated gradient just before a reduction inside backward replaces it."""
        recorder = self._recorder
        if info.wrapper is not None and getattr(info.param, "_post_accumulate_grad_hooks", None):
            recorder.hooked[info.wrapper] = recorder.hooked.get(info.wrapper, 0) + 1

        def on_accumulated(param: Tensor) -> None:
            current = recorder.current
            if current is not None:
                if info.wrapper in current.armed:
                    before_reduce(recorder, current.armed[info.wrapper], info)
            elif info.wrapper is not None and not recorder.suspended:
                recorder.armed.discard(info.wrapper)  # it reduces in a pass that is not recorded

        self._hooks.append(info.param.register_post_accumulate_grad_hook(on_accumulated))


def put_first(leaf: Tensor, hook_id: int) -> None:
    """Let one of a tensor's hooks run before those that the user registered earlier: hooks run in the dictionary's
    order, and what a user's hook does to a gradient (scale it, all-reduce it) is to be seen, not to be taken for the
    gradient's own value."""
    hooks = leaf._backward_hooks
    if hooks is not None and len(hooks) > 1 and next(iter(hooks)) != hook_id:
        others = [(key, hook) for key, hook in hooks.items() if key != hook_id]
        own = hooks[hook_id]
        hooks.clear()
        hooks[hook_id] = own
        hooks.update(others)


def arrived(recorder: Recorder, info: ParamInfo, grad: Tensor | None) -> Tensor | None:
    """A contribution's own gradient arrived at a parameter. Runs once a parameter: guarded by hand and kept short."""
    current = recorder.current
    if current is None or grad is None:  # None: a function of the user's returned no gradient for it
        return None
    start = time.perf_counter_ns()
    code: Tensor | None = None
    try:
        if (current.inner or current.held) and current.holds(info, grad):
            return None
        if recorder.armed and info.wrapper in recorder.armed and info.wrapper not in current.armed:
            arms(recorder, current, info.wrapper)  # type: ignore[arg-type]
        if recorder.impulses is not None:
            code = recorder.impulses.code(recorder, current, info, grad)
        recorder.leaf(current, info, grad if code is None else code)
    except Exception as error:
        recorder.failed("autograd", error)
    finally:
        recorder.probe_ns += time.perf_counter_ns() - start
    return code  # None leaves the gradient as it is, bit for bit


def arms(recorder: Recorder, current: BackwardPass, wrapper: int) -> None:
    """The first gradient arrived that a wrapper reduces in this pass; hooks of the user's may do so before it."""
    room = HOOKS_REDUCE * recorder.hooked.get(wrapper, 0)
    seq = current.armed[wrapper] = recorder.next_seq(room)
    if room:
        current.before_armed[wrapper] = iter(range(seq - room, seq))


@guarded("autograd")
def before_reduce(recorder: Recorder, seq: int, info: ParamInfo) -> None:
    if recorder.current is not None and info.wrapper is not None:
        recorder.current.accumulated.add(info.wrapper)
        recorder.current.handed_over.add(info.id)
    recorder.sample_grads(seq, BEFORE, [info])


@guarded("autograd")
def add_root(recorder: Recorder, root: nn.Module, stage: int | None) -> None:
    """Name and hook everything below a root module."""
    discovery: Discovery = recorder.discovery
    for listener in WRAPPED_LISTENERS:
        listener(recorder, root)
    new = list(recorder.registry.add_root(root, stage))
    for listener in ROOT_LISTENERS:
        listener(recorder, root)
    for info in new:
        discovery.hook(info, info.param)
        discovery.remember_frozen(info)
