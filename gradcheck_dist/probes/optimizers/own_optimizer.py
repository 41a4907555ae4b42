"""Optimizers that are none of torch.optim: a hand-written `p -= lr * p.grad`, or a library's own class.

Nothing calls a hook when such an optimizer steps. What tells is that parameters hold other values than behind the last
backward pass, when the next loss is computed, a backward pass begins or gradients are emptied. The step ends there.
What it read are the gradients that still lie in `.grad`, or did until they were emptied: they are held until then, or
until a module is called to compute the next loss, so that they take no memory beside its activations.

On an accelerator nobody waits to compare values: there in-place changes are known by autograd's version counter.
A parameter that another rank broadcasts behind its step is updated there: here nobody has read its gradient.
Where parameters hold other values behind a backward pass than before it, hooks have updated them (LOMO), and what these
read is not known; an accelerator tells that later. Where torch.optim is in use, this probe rests; where what was made
of it never steps, and parameters change between passes all the same, that is told in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import handle_torch_function, has_torch_function

from gradcheck_dist.events import (
    BEFORE,
    OWN_OPTIMIZER,
    OWN_OPTIMIZER_PROBE,
    REPLACED_UNSEEN,
    UNSEEN_UPDATE,
    UPDATED_BETWEEN,
    UPDATED_INSIDE,
    OptimizerStep,
    ProbeStatus,
)
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.optimizers.norms import record_norms, record_taken, taken
from gradcheck_dist.probes.parameters.regions import main_grad_of
from gradcheck_dist.probes.parameters.registry import LocalPlan, ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording import module_calls
from gradcheck_dist.probes.recording.deferred import stacked
from gradcheck_dist.probes.recording.dynamo import untraced
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.samples import elements
from gradcheck_dist.probes.recording.sites import caller_site
from gradcheck_dist.stats.norms import PendingNorms
from gradcheck_dist.stats.sampling import sample_positions

MAX_PARAMS, MAX_VALUES = 8, 16
"""Whose values are looked at, and how many of each."""
Noted = tuple[Tensor, Tensor, Tensor | tuple[int, int]]
"""A parameter, the places that are looked at, and what it held there."""


class OwnOptimizer:
    """What parameters held behind the last backward pass, and the gradients that it left."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begun = False  # whether a backward pass came since the last step
        self._noted: list[Noted] = []
        self.grads: dict[int, tuple[ParamInfo, Tensor]] = {}  # by parameter
        self._forward: Callable[[], None] | None = None  # ends the wait for a module's call while gradients are held
        self._replaced: set[int] = set()  # parameters in the place of whose gradient another one was seen
        self._zero: set[int] = set()  # parameters whose gradient is zero as it came
        self._emptied: dict[int, tuple[LocalPlan, Tensor]] = {}  # by parameter, what was read before it was emptied
        self._norms: dict[int, tuple[int, int, PendingNorms]] = {}  # and its norm
        self._moved: dict[int, ParamInfo] = {}  # by the id of a buffer into which hooks have moved a gradient
        self._received: set[int] = set()  # parameters that another rank has broadcast since
        self._places: dict[tuple[int, int], int] = {}  # parameters by where they lie and their size, once asked for
        self._before: list[Noted] = []  # what parameters held before the backward pass that is under way
        self._sizes: list[int] = []  # and how many elements each had
        self.looks_inside = True  # until an optimizer of torch's steps; LOMO is one and never does
        self.is_updated = False  # whether most parameters changed between two passes until then

    def opens(self) -> None:
        """A backward pass begins."""
        infos = (info for info in self._recorder.registry.infos() if info.param.requires_grad and not info.regions)
        known = [param for param, _, _ in self._before]
        params = _some([info.param for info in infos])
        same = len(known) == len(params) and all(one is other for one, other in zip(known, params, strict=True))
        begun = _again(self._before, inside=True) if same else _values(params, inside=True)
        if same and all(is_host(param) for param in params):  # nobody waits for an accelerator
            self.is_updated |= 2 * _num_unlike(self._before, begun) > len(begun)
        self._before = begun
        self._sizes = [param.numel() for param, _, _ in self._before]

    def passed(self, touched: dict[int, ParamInfo]) -> None:
        """A backward pass is over."""
        if self.looks_inside and self._before and self._updated_inside():
            self._begun, self.grads = False, {}
            self._recorder.status(OWN_OPTIMIZER_PROBE, False, UPDATED_INSIDE)
            self._recorder.end_step()
            return
        if self._recorder.own_optimizer is None:
            return
        self._emptied.clear()
        self._norms.clear()
        self._received.clear()
        self._replaced.clear()
        self._places.clear()
        self._recorder.places.looked_at = self._looked_at
        held = {info.id: info for info, _ in self.grads.values()} | touched
        self.grads = {key: (info, grad) for key, info in held.items() if (grad := _kept(info)) is not None}
        self._moved = {id(grad): info for info, grad in self.grads.values() if info.param.grad is None}
        arrived = {key: self.grads[key][1] for key in touched if key in self.grads}
        for key in [key for key, grad in arrived.items() if _local(grad) is None]:
            del self.grads[key]
        self._zero -= touched.keys()
        self._zero.update(key for key, grad in arrived.items() if not _is_there(grad))
        self.note([info.param for info, _ in self.grads.values() if not info.regions])
        if self._forward is None:
            self._forward = module_calls.listen(kept_away(self._recorder, "own_optimizer", self._called))

    def _looked_at(self, info: ParamInfo) -> None:
        """A gradient was looked at: one that a line put in the place of what the pass left is what will be read
        (`p.grad = p.grad * c`)."""
        grad = _kept(info) if self._recorder.current is None else None
        if grad is not None and info.id in self.grads and grad is not self.grads[info.id][1]:
            self.grads[info.id] = (info, grad)
            self._replaced.add(info.id)

    def _updated_inside(self) -> bool:
        """Whether most parameters hold other values than before the pass. On an accelerator that is told later, and the
        step does not end here. One that is whole only while it is used (ZeRO 3) does not tell."""
        sizes = zip(self._before, self._sizes, strict=True)
        before = [noted for noted, size in sizes if _local(noted[0]) is not None and noted[0].numel() == size]
        if all(is_host(param) for param, _, _ in before):
            return 2 * _num_changed(before) > len(before)
        pairs = [(state, _state(param, which, inside=True)) for param, which, state in before]
        changed = [
            (one != other).any() for one, other in pairs if isinstance(one, Tensor) and isinstance(other, Tensor)
        ]
        if changed:
            self._recorder.emit(_perhaps_inside, updated=2 * stacked(changed).sum() > len(changed))
        return False

    def _called(self, *_: Any) -> None:
        """A module is called: unless that is part of a pass, or nothing is trained, the next loss is under way."""
        if self._recorder.current is None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.rest()
            self.look()

    def rest(self) -> None:
        """Wait for no module."""
        if self._forward is not None:
            self._forward()
            self._forward = None

    def idles(self) -> None:
        """A backward pass begins of which nothing is recorded: steps are counted all the same."""
        known = self._recorder.registry.infos() if not self._noted else ()
        self.note([info.param for info in known if info.param.requires_grad and not info.regions] if known else None)
        if self._forward is None:
            self._forward = module_calls.listen(kept_away(self._recorder, "own_optimizer", self._called))

    def note(self, params: list[Tensor] | None = None) -> None:
        """Note what parameters hold when a step has begun; None: of those that were noted before."""
        self._begun = True
        chosen = None if params is None else _some(params)
        same = chosen is None or list(map(id, chosen)) == [id(param) for param, _, _ in self._noted]
        self._noted = _again(self._noted) if chosen is None or same else _values(chosen)

    def emptied(self, grad: Tensor) -> None:
        """A tensor is about to be filled with zeros by hand; it may be a gradient."""
        recorder = self._recorder
        info = self._moved.get(id(grad)) or recorder.places.whose(grad) if recorder.current is None else None
        if info is None or info.id not in self.grads or info.id in self._emptied:
            return
        held = _kept(info)
        assert held is not None
        found = recorder.registry.plan(info, held) if recorder.sampling and info.active else None
        values = elements(found[1].detach(), found[0].indices) if found is not None else None
        if found is not None and values is not None:
            self._emptied[info.id] = (found[0], values)
            if (norm := self._norm(info, held)) is not None:
                self._norms[info.id] = norm

    def _norm(self, info: ParamInfo, grad: Tensor) -> tuple[int, int, PendingNorms] | None:
        """A parameter, its plan and the norm of its gradient, which is put elsewhere or emptied; None of what is not
        read, and of a tensor that holds several parameters."""
        found, norm = (self._recorder.registry.plan(info, grad), taken(grad)) if not info.regions else (None, None)
        return (info.id, found[0].id, norm) if found is not None and norm is not None else None

    def received(self, tensor: Tensor) -> None:
        """Another rank broadcasts a tensor; it may be a parameter."""
        local = _local(tensor)
        if local is None or not self.grads:
            return
        if not self._places:
            held = [(key, None if info.regions else _local(info.param)) for key, (info, _) in self.grads.items()]
            self._places = {(one.data_ptr(), one.numel()): key for key, one in held if one is not None}
        key = self._places.get((local.data_ptr(), local.numel()))
        if key is not None:
            self._received.add(key)

    def look(self) -> None:
        """Whether an optimizer has stepped since: most parameters are not what they were."""
        if self._begun and self._noted and self._recorder.current is None:
            look(self._recorder, self)

    def compare(self) -> None:
        if 2 * _num_changed(self._noted) >= len(self._noted):
            self._stepped()

    def _stepped(self) -> None:
        recorder = self._recorder
        # What was put in the place of a gradient since, and still lies there, is what was read.
        own = [pair for key, pair in self.grads.items() if key not in self._received]
        held = [(info, grad if info.param.grad is None else info.param.grad) for info, grad in own]
        emptied = {key: found for key, found in self._emptied.items() if key not in self._received}
        norms = [norm for key, norm in self._norms.items() if key not in self._received]
        gone = [info.id for info, _ in own if info.param.grad is None]
        unseen = bool(self._replaced) and not self._replaced.issuperset(gone)  # replaced, too, where nobody looked
        self._begun, self.grads, self._moved = False, {}, {}
        self._emptied.clear()
        self._norms.clear()
        self._received.clear()
        self._replaced.clear()
        if not recorder.recording:
            recorder.end_step()
            return
        seq, infos = recorder.next_seq(), [info for info, _ in held]
        left = [(info, grad) for info, grad in held if info.id not in emptied]
        there = [(info, grad) for info, grad in left if info.id in self._zero or _is_there(grad)]
        if len(there) + len(emptied) < len(infos) and recorder.sampling:
            recorder.status(OWN_OPTIMIZER_PROBE, False, UNSEEN_UPDATE)
            recorder.end_step()
            return
        if unseen and recorder.sampling:
            recorder.status(OWN_OPTIMIZER_PROBE, False, REPLACED_UNSEEN)
            recorder.end_step()
            return
        for info, grad in there:
            recorder.sample(seq, BEFORE, info, grad)
        for plan, values in emptied.values():
            recorder.keep(seq, BEFORE, plan, values)
        recorder.read.note(recorder.step, [info for info, _ in there])
        if all(info.param.grad is grad for info, grad in there) and not emptied:
            record_norms(recorder, seq, infos)
        elif recorder.sampling:
            norms += [one for info, grad in there if (one := self._norm(info, grad)) is not None]
            record_taken(recorder, seq, norms if len(norms) == len(infos) else ())
        recorder.emit(
            OptimizerStep,
            seq=seq,
            site=caller_site(),
            optimizer=OWN_OPTIMIZER,
            params=recorder.registry.param_set(infos),
        )
        if recorder.replicas is not None:
            recorder.replicas.is_over()
        recorder.end_step()


def install(recorder: Recorder, patches: Patches) -> None:
    own = recorder.own_optimizer = OwnOptimizer(recorder)

    def end() -> None:
        if own.looks_inside and own.is_updated and recorder.own_optimizer is None:
            recorder.status(OWN_OPTIMIZER_PROBE, False, UPDATED_BETWEEN)
        rest()

    def rest(*_: Any) -> None:
        recorder.own_optimizer = None
        own.rest()
        own.grads.clear()

    def stop(*_: Any) -> None:
        rest()
        own.looks_inside = False

    def watch_making(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def make(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            rest()

        return make

    def watch_zero(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(original)
        def zero_(self: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return original(self)
            if has_torch_function((self,)):
                return handle_torch_function(original, (self,), self)  # type: ignore[no-any-return]
            if (
                recorder.own_optimizer is not None
                and own.grads
                and (type(self) is Tensor or hasattr(self, "_local_tensor"))
            ):
                emptied(recorder, own, self)
            return original(self)

        return zero_

    def opened(recorder: Recorder, *_: Any) -> None:
        if own.looks_inside:
            opens(recorder, own)

    def closed(recorder: Recorder, current: BackwardPass) -> None:
        if own.looks_inside:
            passed(recorder, own, current)

    patches.replace(Optimizer, "__init__", watch_making)
    patches.on_restore(register_optimizer_step_pre_hook(untraced(stop)).remove)
    patches.replace(Tensor, "zero_", watch_zero)
    patches.on_restore(end)
    autograd.OPEN_LISTENERS.append(opened)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(opened))
    autograd.CLOSE_LISTENERS.append(closed)
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(closed))


@guarded("own_optimizer")
def opens(recorder: Recorder, own: OwnOptimizer) -> None:
    own.opens()


@guarded("own_optimizer")
def passed(recorder: Recorder, own: OwnOptimizer, current: BackwardPass) -> None:
    own.passed(current.touched)


@guarded("own_optimizer")
def emptied(recorder: Recorder, own: OwnOptimizer, grad: Tensor) -> None:
    own.emptied(grad)


@guarded("own_optimizer")
def look(recorder: Recorder, own: OwnOptimizer) -> None:
    own.compare()


def _some(params: list[Tensor]) -> list[Tensor]:
    return params[:: max(1, len(params) // MAX_PARAMS)][:MAX_PARAMS]


def _perhaps_inside(*, updated: bool, **fields: Any) -> ProbeStatus:
    return ProbeStatus(
        probe=OWN_OPTIMIZER_PROBE, active=not updated, reason=UPDATED_INSIDE if updated else "", **fields
    )


def _kept(info: ParamInfo) -> Tensor | None:
    """Where a parameter's gradient lies: in `.grad`, or in a buffer into which hooks move it."""
    return info.param.grad if info.param.grad is not None else main_grad_of(info)


def _values(params: list[Tensor], inside: bool = False) -> list[Noted]:
    """What these hold at places of their own. `inside`: around one pass, values on an accelerator, too."""
    noted: list[Noted] = []
    for param in params:
        local = _local(param)
        if local is not None:
            which = torch.as_tensor(sample_positions("own", local.numel(), MAX_VALUES), device=local.device)
            noted.append((param, which, _state(param, which, inside)))
    return noted


def _again(noted: list[Noted], inside: bool = False) -> list[Noted]:
    """What these hold now."""
    return [(param, which, _state(param, which, inside)) for param, which, _ in noted]


def _num_changed(noted: list[Noted]) -> int:
    return _num_unlike(noted, _again(noted))


def _num_unlike(noted: list[Noted], later: list[Noted]) -> int:
    return sum(not _same(state, now) for (_, _, state), (_, _, now) in zip(noted, later, strict=True))


def _local(tensor: Tensor) -> Tensor | None:
    """What this rank holds of a tensor; None where that is nothing, or no plain tensor."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if type(local) is not Tensor or local.layout is not torch.strided:
        return None
    return local if local.numel() and not local.is_meta and local.untyped_storage().size() else None


def _state(param: Tensor, which: Tensor, inside: bool = False) -> Tensor | tuple[int, int]:
    local = getattr(param, "_local_tensor", param)
    if not is_host(local):
        if inside and _local(param) is not None:
            return local.detach().take(which.clamp(max=local.numel() - 1))  # a place that is not there would be fatal
        return (local._version, local.data_ptr())
    return local.detach().take(which) if int(which.max()) < local.numel() else local.new_empty(0)


def _same(one: Tensor | tuple[int, int], other: Tensor | tuple[int, int]) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (not isinstance(one, Tensor) and one == other)


def _is_there(grad: Tensor) -> bool:
    """Whether a gradient was not filled with zeros. On an accelerator nobody waits to see that."""
    local = _local(grad)
    return local is not None and (not is_host(local) or bool(local.any()))
