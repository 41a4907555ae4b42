"""DistributedDataParallel: which backward reduces, over which group, by which operation, and what came out.

The reducer runs in C++. Whether it is armed is decided in forward (`_post_forward` calls prepare_for_backward when
`require_backward_grad_sync` holds), so this is where it is read. Others arm it by hand: a pipeline's last backward
(torch/distributed/pipelining/stage.py, backward_maybe_with_nosync), and Lightning, whose manual optimization runs
backward inside of forward. No communication hook is registered: the one that DDP allows stays the user's. The default
reducer divides by the group size and sums (reducer.cpp): "avg".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcheck_dist.events import AFTER, UNSYNCED_PAST, UNSYNCED_TOLD, UNSYNCED_WAITS
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

_AVERAGING_HOOKS = {
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "powerSGD_hook",
    "batched_powerSGD_hook",
}


class _State:
    """What is known of one DDP instance. `frozen`: parameters that the reducer has had from the start and that ask for
    no gradient now, as those of an optimizer whose turn it is not. `forward`: whether its last forward was told to let
    the next backward reduce, None before there was one; `held` are those which were not, and have not gone backward."""

    def __init__(self, ddp: DistributedDataParallel, wrapper: int) -> None:
        self.ddp, self.wrapper = ddp, wrapper
        self.infos: list[ParamInfo] = []
        self.frozen: list[ParamInfo] = []
        self.forward: bool | None = None
        self.held = 0
        self.group = tuple(dist.get_process_group_ranks(ddp.process_group))

    def take(self, recorder: Recorder, infos: list[ParamInfo]) -> None:
        """The reducer has these parameters."""
        self.frozen = [info for info in infos if not info.param.requires_grad]
        for info in infos:
            if info.param.requires_grad:
                known = info.managed_by == "ddp"
                info.managed_by, info.wrapper = "ddp", self.wrapper
                if not known:
                    recorder.discovery.hook_accumulated(info)
                self.infos.append(info)


def install(recorder: Recorder, patches: Patches) -> None:
    def watch_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            made(recorder, self)
            original(self, *args, **kwargs)
            built(recorder, self)

        return init

    def watch_post_forward(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def post_forward(self: DistributedDataParallel, output: Any) -> Any:
            if torch.is_grad_enabled():
                (arm if self.require_backward_grad_sync else hold)(recorder, self)
            return original(self, output)

        return post_forward

    def watch_prepare(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def prepare_for_backward(self: Any, *args: Any, **kwargs: Any) -> None:
            arm_by_hand(recorder, self)
            original(self, *args, **kwargs)

        return prepare_for_backward

    def step_comes(optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if recorder.current is not None and recorder.current.armed:
            reads_early(recorder, recorder.current, optimizer)

    patches.on_restore(register_optimizer_step_pre_hook(step_comes).remove)
    patches.replace(DistributedDataParallel, "__init__", watch_init)
    patches.replace(DistributedDataParallel, "_post_forward", watch_post_forward)
    distributed: Any = dist  # whose stubs do not have it
    patches.replace(distributed.Reducer, "prepare_for_backward", watch_prepare)
    autograd.ROOT_LISTENERS.append(find_wrappers)
    autograd.CLOSE_LISTENERS.append(complete)
    patches.on_restore(lambda: autograd.ROOT_LISTENERS.remove(find_wrappers))
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(complete))


@guarded("ddp")
def made(recorder: Recorder, module: nn.Module) -> None:
    """A data-parallel wrapper is made, by the line that leads here."""
    recorder.registry.wrapper_sites[id(module)] = caller_site()


@guarded("ddp")
def built(recorder: Recorder, ddp: DistributedDataParallel) -> None:
    """Its reducer has what asks for a gradient now, whatever is frozen in a pass, and under whatever name it lies then
    (below an adapter)."""
    recorder.registry.wrappers_built.add(ddp)
    recorder.registry.wrapper_trains[id(ddp)] = {id(param) for param in ddp.module.parameters() if param.requires_grad}


def find_wrappers(recorder: Recorder, root: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module, DistributedDataParallel):
            state_of(recorder, module, name)


def state_of(recorder: Recorder, ddp: DistributedDataParallel, name: str = "") -> _State:
    states: dict[int, _State] = recorder.ddp_states
    state = states.get(id(ddp))
    if state is None:
        group = tuple(dist.get_process_group_ranks(ddp.process_group))
        wrapper = recorder.registry.wrapper(ddp, "ddp", name or type(ddp.module).__name__, group)
        ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
        trained = recorder.registry.wrapper_trains.get(id(ddp))
        state = states[id(ddp)] = _State(ddp, wrapper)
        found = []
        for param_name, param in ddp.module.named_parameters():
            info = recorder.registry.find(param)
            has_it = param.requires_grad if trained is None else id(param) in trained
            if info is not None and has_it and param_name not in ignored:
                found.append(info)
        state.take(recorder, found)
    elif state.frozen:
        state.take(recorder, state.frozen)
    return state


@guarded("ddp")
def arm(recorder: Recorder, ddp: DistributedDataParallel) -> None:
    """The reducer will reduce in the next backward."""
    state = known(recorder, ddp)
    state.forward, state.held = True, 0
    recorder.armed.add(state.wrapper)


@guarded("ddp")
def hold(recorder: Recorder, ddp: DistributedDataParallel) -> None:
    """The reducer is told not to reduce in the next backward."""
    state = known(recorder, ddp)
    state.forward, state.held = False, state.held + 1


@guarded("ddp")
def known(recorder: Recorder, ddp: DistributedDataParallel) -> _State:
    """What is known of a wrapper, which no module holds where `replicate` made it."""
    if id(ddp) not in recorder.registry.known_modules:
        autograd.add_root(recorder, ddp, None)
    return state_of(recorder, ddp)


@guarded("ddp")
def arm_by_hand(recorder: Recorder, reducer: object) -> None:
    """Somebody arms a reducer, in forward or behind it."""
    states: dict[int, _State] = recorder.ddp_states
    for state in [*states.values()]:
        if getattr(state.ddp, "reducer", None) is reducer:
            arm(recorder, state.ddp)


@guarded("ddp")
def reads_early(recorder: Recorder, current: BackwardPass, optimizer: Optimizer) -> None:
    """An optimizer steps inside of a backward pass: in front of a reduction that has not finished. Those of a
    communication hook, which may step behind it, are left out."""
    states: dict[int, _State] = recorder.ddp_states
    ahead = [state for state in states.values() if state.wrapper in current.armed and not _is_behind(state, current)]
    if ahead:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
        current.read_early.update(info.id for state in ahead for info in state.infos if id(info.param) in stepped)


def _is_behind(state: _State, current: BackwardPass) -> bool:
    """Whether what runs now may come behind a wrapper's reduction. A reducer that has not been given anything yet calls
    itself finished, too."""
    if getattr(state.ddp, "_comm_hooks", []):
        return True  # it may step behind its own reduction
    waits_for_all = not (state.ddp.find_unused_parameters or getattr(state.ddp, "static_graph", False))
    if waits_for_all and not all(info.id in current.handed_over for info in state.infos):
        return False
    return _finished(state)


def complete(recorder: Recorder, current: BackwardPass) -> None:
    """At the end of a pass: say of each DDP instance that took part whether it reduced."""
    states: dict[int, _State] = recorder.ddp_states
    touched = {info.wrapper for info in current.touched.values()}
    if recorder.registry.wrappers_built and _trained_past(recorder, current):
        current.unsynced = UNSYNCED_PAST
    for state in states.values():
        if state.wrapper not in touched:
            continue
        # Armed is not enough: where gradients are computed by autograd.grad (zero-bubble schedules), AccumulateGrad,
        # on which the reducer hangs, never runs.
        seq = current.armed.get(state.wrapper) if state.wrapper in current.accumulated else None
        if seq is not None:
            recorder.armed.discard(state.wrapper)
        current.sync = seq is not None and _got_through(state, current)
        current.unsynced = None if current.sync else _why(state, is_armed=seq is not None)
        if seq is None or not current.sync:
            continue
        op, hook = _operation(state.ddp, current)
        own: dict[str, Any] = {"impl": "ddp", "op": op, "group": state.group, "wrapper": state.wrapper, "hook": hook}
        replicas = _replicas(state, current, op, hook)
        apart = _of_own_group(state, current, replicas)
        late = [info for info in state.infos if info.id in current.read_early]  # they have no hook, nor a second group
        both = [info for info in state.infos if info not in apart and info not in late]
        if both:
            recorder.emit_reduce(seq, both, **own, **replicas)
            recorder.sample_grads(seq, AFTER, both)
        if rest := apart or late:
            behind = recorder.next_seq()
            recorder.emit_reduce(behind, rest, **own)
            recorder.sample_grads(behind, AFTER, rest)


def _got_through(state: _State, current: BackwardPass) -> bool:
    """Whether the reducer has finished. Without `find_unused_parameters` it waits for every parameter: a pass that
    leaves one out reduces none, and only the next forward says so."""
    return all(info.id in current.touched for info in state.infos) or _finished(state)


def _why(state: _State, *, is_armed: bool) -> str | None:
    """Why a wrapper did not reduce; None where that is not known, as where one forward is gone backward from again."""
    if is_armed:
        return UNSYNCED_WAITS
    if state.forward is None:
        return UNSYNCED_PAST
    state.held -= 1
    return UNSYNCED_TOLD if state.held >= 0 else None


def _trained_past(recorder: Recorder, current: BackwardPass) -> bool:
    """Whether a pass reached parameters of an instance through which no forward ever went."""
    reached = {id(info.param) for info in current.touched.values() if info.wrapper is None}
    trains = recorder.registry.wrapper_trains
    return any(not reached.isdisjoint(trains.get(id(ddp), ())) for ddp in recorder.registry.wrappers_built)


def _finished(state: _State) -> bool:
    """Whether the reducer says so, or does not tell."""
    check = getattr(getattr(state.ddp, "reducer", None), "_check_reducer_finalized", None)
    try:
        if check is not None:
            check()
    except RuntimeError:
        return False
    return True


def _operation(ddp: DistributedDataParallel, current: BackwardPass) -> tuple[str, str | None]:
    """The reduce operation and the name of a user's hook: what torch documents, or what the hook was seen calling."""
    hooks = getattr(ddp, "_comm_hooks", [])
    if not hooks:
        return "avg", None
    hook = hooks[0][0]
    module, name = getattr(hook, "__module__", "") or "", getattr(hook, "__qualname__", repr(hook))
    if module.startswith("torch.") and name in _AVERAGING_HOOKS:
        return "avg", name
    return (next(iter(current.reduce_ops)) if len(current.reduce_ops) == 1 else "unknown"), f"{module}.{name}"


def _replicas(state: _State, current: BackwardPass, op: str, hook: str | None) -> dict[str, Any]:
    """The other group of a hook that reduces over two, one across the other, as nodes and the ranks of each do."""
    others = [group for group in current.reduce_groups if group != state.group and len(group) > 1]
    if (
        hook is None
        or len(others) != 1
        or len(current.reduce_groups) != 2
        or len(set(others[0]) & set(state.group)) != 1
    ):
        return {}
    return {"replicate_group": others[0], "replicate_op": op}


def _of_own_group(state: _State, current: BackwardPass, replicas: dict[str, Any]) -> list[ParamInfo]:
    """The parameters that such a hook reduces over the wrapper's own group alone: where its second group is of ranks of
    one model, what each of these has a part of. Empty where it is not known what all of the others are."""
    over = replicas.get("replicate_group", ())
    known = current.reduced_over.get(over, {})
    if not known or sum(info.param.numel() for info in known.values()) != current.reduce_groups[over]:
        return []
    return [info for info in state.infos if info.id not in known]
