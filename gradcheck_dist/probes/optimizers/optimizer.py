"""What the optimizer reads, and zero_grad."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradcheck_dist.events import BEFORE, OptimizerStep, ParamGroup, ZeroGrad
from gradcheck_dist.probes.optimizers import amp, clips, loose
from gradcheck_dist.probes.optimizers.norms import record_norms
from gradcheck_dist.probes.optimizers.params import params_of
from gradcheck_dist.probes.optimizers.parent_steps import ParentSteps
from gradcheck_dist.probes.optimizers.replaced import given
from gradcheck_dist.probes.optimizers.step_hooks import BehindHooks
from gradcheck_dist.probes.optimizers.updates import Updates, updates_begin, updates_end
from gradcheck_dist.probes.parameters.regions import main_grad_of
from gradcheck_dist.probes.parameters.registry import ParamInfo, originals
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.captured import OPTIMIZER
from gradcheck_dist.probes.recording.dynamo import untraced
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site

HYPERPARAMETERS: tuple[str, ...] = (
    "weight_decay",
    "eps",
    "momentum",
    "dampening",
    "nesterov",
    "decoupled_weight_decay",
    "maximize",
)
MAX_NUMBERS = 32
_held: weakref.WeakKeyDictionary[Optimizer, tuple[int, dict[str, float]]] = weakref.WeakKeyDictionary()
"""What optimizers held as their last recorded step began, and its number."""


def install(recorder: Recorder, patches: Patches) -> None:
    waiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # made, and not known to be watched whole
    under_way: list[tuple[Optimizer, int | None]] = []  # steps that have begun, the outermost first
    updates = Updates()

    def watch_making(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def make(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            waiting.add(self)
            comes(recorder, self.param_groups)

        return make

    def watch_adding(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
            original(self, param_group)
            comes(recorder, self.param_groups[-1:])
            given(recorder, self)

        return add_param_group

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if recorder.captures.under_way:
            recorder.captures.holds(OPTIMIZER)
        step_comes(recorder, optimizer, kwargs, _closure(args, kwargs))

    @guarded("optimizer")
    def step_comes(recorder: Recorder, optimizer: Optimizer, kwargs: dict[str, Any], closure: bool) -> None:
        if parents.is_inside(optimizer):
            if hooks.are_others(optimizer):  # they run once more, in front of the parent's step
                hooks.call(optimizer, functools.partial(begins_again, recorder, optimizer))
        elif closure:  # the gradients are computed inside step: they are read after it
            recorder.closure_passes = 0
        else:
            under_way[:] = [(outer, seq) for outer, seq in under_way if outer is not optimizer]
            if recorder.recording:
                parents.watch(optimizer)
                hooks.call(optimizer, functools.partial(begins, recorder, optimizer, kwargs))
            elif recorder.records_next and not recorder.captures.under_way:
                params = (param for group in optimizer.param_groups for param in group["params"])
                recorder.read.before.keep(recorder.step, params)

    @guarded("optimizer")
    def begins(recorder: Recorder, optimizer: Optimizer, kwargs: dict[str, Any]) -> None:
        seq = stepping(recorder, optimizer, waiting, under_way[-1][1] if under_way else None, kwargs)
        under_way.append((optimizer, seq))
        updates_begin(recorder, updates, optimizer)
        if parents.may_follow(optimizer):
            recorder.between_passes = recorder.sampling

    @guarded("optimizer")
    def begins_again(recorder: Recorder, optimizer: Optimizer) -> None:
        seq = next((seq for outer, seq in under_way if outer is optimizer), None)
        if seq is not None and recorder.sampling:  # without samples it tells nothing more
            stepping(recorder, optimizer, waiting, seq)

    @guarded("optimizer")
    def goes_on(recorder: Recorder, optimizer: Optimizer) -> bool:
        """Whether what ends is a parent's step, inside of the optimizer's own."""
        inside = parents.is_inside(optimizer)
        if not inside:
            hooks.remove(optimizer)
        return inside

    def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if goes_on(recorder, optimizer):
            return
        recorder.closure_passes = None
        if _closure(args, kwargs):
            stepping(recorder, optimizer, waiting)
        else:
            updates_end(recorder, updates, optimizer)
        under_way[:] = [(other, seq) for other, seq in under_way if other is not optimizer]
        stepped(recorder, optimizer)

    untraced(before)
    hooks, parents = BehindHooks(before), ParentSteps(recorder, patches, begins_again)
    patches.replace(Optimizer, "__init__", watch_making)
    patches.replace(Optimizer, "add_param_group", watch_adding)
    patches.on_restore(register_optimizer_step_pre_hook(before).remove)
    patches.on_restore(register_optimizer_step_post_hook(untraced(after)).remove)
    patches.replace(Optimizer, "zero_grad", lambda original: untraced(_watch_zero(recorder, original)))
    patches.replace(torch.nn.Module, "zero_grad", lambda original: _watch_zero(recorder, original))
    clips.install(recorder, patches)
    loose.install(recorder, patches, waiting)


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)


@guarded("optimizer")
def stepping(
    recorder: Recorder,
    optimizer: Optimizer,
    waiting: weakref.WeakSet[Optimizer],
    inside: int | None = None,
    given: Mapping[str, Any] | None = None,
) -> int | None:
    """An optimizer reads its gradients, maybe `inside` of another's step. The number of that event, or None."""
    # A step before any training (DeepSpeed's, to make the optimizer's state) is none.
    if not (recorder.recording and recorder.trained):
        return None
    recorder.between_passes = False
    if recorder.writes is not None:
        recorder.writes.multiples.confirm()
    params = (param for group in optimizer.param_groups for param in group["params"])
    infos = params_of(recorder, params, owner=True, inside=inside is not None)
    by_torch = type(optimizer).__module__.startswith("torch.optim.")  # which read `.grad` of their own tensors alone
    infos = [info for info in (infos if by_torch else _of_model(infos)) if not _lies_elsewhere(info)]
    if recorder.current is None and infos:
        recorder.begins_empty(infos)
    inside_pass, before = recorder.current is not None, recorder.read.in_step(recorder.step)
    if inside_pass or before:
        # One that steps each parameter as soon as its gradient is there has no use for the others, nor for it again.
        infos = [one for one in infos if one.param.grad is not None or not (inside_pass or one.id in before)]
        if not infos:
            return None
    if inside is None:
        amp.read_scaled(recorder, optimizer, infos)
    seq = recorder.next_seq()
    seen = recorder.sample_grads(seq, BEFORE, infos)
    recorder.read.note(recorder.step, infos)
    if recorder.stale is not None:
        recorder.stale.stepping(infos)
    if recorder.current is not None:
        recorder.threads.beside(recorder.current.thread)
    else:
        recorder.threads.reads(original.id for info in infos for original in originals(info))
    clipped = recorder.clipped
    rest = [info for info in infos if info.id not in clipped] if clipped else infos
    record_norms(recorder, seq, rest, seen)
    groups = [] if len(optimizer.param_groups) < 2 else optimizer.param_groups
    first = optimizer.param_groups[0] if optimizer.param_groups else {}
    discovery = recorder.discovery
    without = [info for info in infos if info.param.grad is None and originals(info)]
    # Megatron's, which an optimizer of its own reads.
    buffers = {} if by_torch else {info.id: main_grad_of(info) for info in without}
    kept = {key: buffer for key, buffer in buffers.items() if buffer is not None}
    missing = [info for info in without if info.id not in kept]
    for info in without if kept else ():
        if info.id in kept:
            recorder.sample(seq, BEFORE, info, kept[info.id])
    modules_called = discovery.called(optimizer)
    called = [info for info in infos if id(info.param) in modules_called and info.param.requires_grad]
    lacking = {info.id for info in missing} if called else set()
    unreached = [info for info in called if info.id in lacking]
    filled = [info for info in called if info.id not in lacking]
    twice = _listed_twice(optimizer) if by_torch else set()  # others may step each once
    repeated = {info.id: info for info in infos if id(info.param) in twice} if twice else {}
    recorder.emit(
        OptimizerStep,
        seq=seq,
        site=caller_site(),
        optimizer=type(optimizer).__name__,
        params=recorder.registry.param_set(infos),
        lr=_number(first.get("lr")),
        hyperparameters=_hyperparameters(first),
        grads_missing=len(missing),
        groups=tuple(_group(recorder, group) for group in groups),
        unreached=recorder.registry.param_set(unreached) if unreached else None,
        inside=inside,
        numbers={} if by_torch else _numbers(recorder, optimizer, {**first, **(given or {})}),
        called=recorder.registry.param_set(filled) if filled else None,
        repeated=recorder.registry.param_set(list(repeated.values())) if repeated else None,
    )
    if recorder.impulses is not None:
        recorder.impulses.optimizer_comes(recorder)
    # The turn of another optimizer's model (a critic) may come after some steps of this one.
    if discovery.watches(infos) and not _waits(discovery, waiting):
        discovery.stop()
    else:
        discovery.start()
    return seq


def _listed_twice(optimizer: Optimizer) -> set[int]:
    """The ids of parameters that one group of an optimizer has more than once."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        seen = Counter(map(id, group["params"]))
        found |= {key for key, times in seen.items() if times > 1} if len(seen) < len(group["params"]) else set()
    return found


def _of_model(infos: list[ParamInfo]) -> Iterator[ParamInfo]:
    """What an optimizer of the program's own reads: the model's gradients in the place of copies (in float32) that have
    none yet, to which its step hands them on."""
    for info in infos:
        held = originals(info) if info.regions and info.param.grad is None else []
        yield from held if held and all(one.param.grad is not None for one in held) else [info]


def _lies_elsewhere(info: ParamInfo) -> bool:
    """Whether a parameter that was whole in backward has no elements now: what an optimizer steps are other ranks'
    parts of it, and its gradient is gone here."""
    return info.managed_by is None and not info.regions and info.param.numel() == 0 and prod(info.shape) > 0


@guarded("optimizer")
def comes(recorder: Recorder, groups: list[dict[str, Any]]) -> None:
    """An optimizer has got parameters: those of another model, or of a module that was put into a known one."""
    params = (param for group in groups for param in group["params"])
    if not all(recorder.discovery.has_hooked(param) for param in params if param.requires_grad):
        recorder.discovery.look_again()


def _waits(discovery: Any, waiting: weakref.WeakSet[Optimizer]) -> bool:
    """Whether an optimizer has a parameter that is not watched yet; one without is not asked again."""
    while len(waiting) and (other := next(iter(waiting), None)) is not None:
        params = (param for group in other.param_groups for param in group["params"])
        if not all(discovery.has_hooked(param) for param in params if param.requires_grad):
            return True
        waiting.discard(other)
    return False


def _group(recorder: Recorder, group: dict[str, Any]) -> ParamGroup:
    params = recorder.registry.param_set(params_of(recorder, group["params"]))
    return ParamGroup(params, _number(group.get("lr")), _hyperparameters(group))


def _hyperparameters(group: dict[str, Any]) -> dict[str, float]:
    betas = group.get("betas")
    named = {name: group.get(name) for name in HYPERPARAMETERS}
    if isinstance(betas, tuple | list) and len(betas) == 2:
        named |= {"beta1": betas[0], "beta2": betas[1]}
    return {name: number for name, value in named.items() if (number := _number(value)) is not None}


def _numbers(recorder: Recorder, optimizer: Optimizer, given: Mapping[str, Any]) -> dict[str, float]:
    """What an optimizer holds, or is given, that is a number and no hyperparameter that is known. What begins with an
    underscore is counted by schedulers. Without samples only what it held before, or no step in columns would be like
    another one."""
    held = {**vars(optimizer), **given}
    named = {
        name: number
        for name, value in held.items()
        if not name.startswith("_") and name not in (*HYPERPARAMETERS, "lr", "initial_lr")
        if not isinstance(value, bool) and (number := _number(value)) is not None
    }
    found = dict(list(named.items())[:MAX_NUMBERS])
    step, before = _held.get(optimizer, (-1, {}))
    if step != recorder.step:  # a step may call that of its class's parent
        _held[optimizer] = (recorder.step, found)
    return found if recorder.sampling else {name: one for name, one in found.items() if before.get(name) == one}


def _number(value: Any) -> float | None:
    """A hyperparameter as a number; None for what is none, and for a tensor that an accelerator would have to bring."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and is_host(value) else None
    return float(value) if isinstance(value, int | float) else None


@guarded("optimizer")
def stepped(recorder: Recorder, optimizer: Optimizer) -> None:
    if recorder.trained:
        recorder.end_step()
    else:
        recorder.num_before += 1


def _watch_zero(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not torch.compiler.is_compiling() and recorder.recording and not recorder.suspended:
            zeroing(recorder, self, set_to_none)
        original(self, set_to_none)

    return zero_grad


@guarded("zero_grad")
def zeroing(recorder: Recorder, owner: Any, set_to_none: bool) -> None:
    if isinstance(owner, Optimizer):
        params = [param for group in owner.param_groups for param in group["params"]]
    else:
        params = list(owner.parameters())
    recorder.abandon_evaluation()
    if recorder.own_optimizer is not None:
        recorder.own_optimizer.look()
    infos = recorder.registry.asked_before(params, owner=True)
    if infos is None:
        infos = [info for param in params if (info := recorder.registry.find(param)) is not None]
        if len(infos) < len(params):
            recorder.discovery.start()  # what is not known yet has its turn next
    if infos:
        recorder.read.emptied(infos)
        recorder.emit(ZeroGrad, site=caller_site(), params=recorder.registry.param_set(infos), set_to_none=set_to_none)
