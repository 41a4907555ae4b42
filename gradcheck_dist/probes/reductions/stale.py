"""Whether forward passes compute with what parameters are by now.

FSDP leaves a module unsharded until something reshards it, and does not gather again until then: what is unsharded when
the optimizer steps (by a forward pass without a backward pass, `unshard()`, `set_reshard_after_backward(False)`) keeps
its old values in the next forward pass (pytorch/pytorch#137348). torch.autocast keeps its casts of parameters while its
outermost context is open, over optimizer steps, too, and so does a line that casts before the loop.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`unshard`); torch/distributed/fsdp/_flat_param.py
(`needs_unshard`); torch/amp/autocast_mode.py (`clear_autocast_cache`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import Site, StaleParameters
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.graph_leaves import name_of
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.parameters.plans import ParamInfo
from gradcheck_dist.probes.parameters.registry import originals
from gradcheck_dist.probes.recording.guard import hooking
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site
from gradcheck_dist.probes.recording.world import several_ranks

FSDP1, FSDP2 = "torch.distributed.fsdp._flat_param", "torch.distributed.fsdp._fully_shard._fsdp_param_group"
WALKS = 2
"""In so many steps what autograd made of parameters is looked at: what the second finds of the first is old."""
DELAY = 2
"""So many steps of a copy come before it is looked whether they were brought back: some do that a step later, and mean
it."""
MANY = 20_000
"""Nodes of a graph, beyond which it is not looked at any further."""
COMPUTED = {"ToCopy", "Clone", "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Pow", "Exp", "Log", "Sqrt", "Rsqrt", "Abs",
            "Sum", "Mean", "LinalgVectorNorm", "Norm", "Mm", "Addmm", "Bmm", "Cat", "Stack", "Tanh", "Sigmoid",
            "Softplus", "Softmax", "WeightNormInterface", "Embedding", "Index", "IndexSelect", "Gather"}  # fmt: skip
"""Nodes of what holds values of its own. A view is as new as its parameter, however old its node (a DTensor that is
made of a local tensor once)."""
_MADE_IN = "gradcheck: made in step"


Held = tuple[ParamInfo, Tensor, Tensor]
"""A parameter, this rank's part of what a module computes with, and its shard."""


class Stale:
    """What was unsharded when an optimizer stepped, and nodes of the graph that were seen before it did."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP1's
        self._stepped_over: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP2's groups and FSDP1's handles
        self._found: list[tuple[int, list[ParamInfo], int | Tensor, Site | None]] = []  # by step
        self._walked: list[int] = []  # steps
        self._copies: dict[int, tuple[ParamInfo, set[int]]] = {}  # what is stepped in their place, and in which steps
        self._stepped_at: Site | None = None
        self._steps: set[int] = set()
        self._stepped: set[int] = set()  # ids of parameters, copies or not
        self._with_gradient: tuple[int, set[int]] = (-1, set())  # a step, and what had one in it
        self._has_looked = False

    def stepping(self, infos: list[ParamInfo]) -> None:
        """An optimizer is about to change these parameters, or copies of parameters."""
        _stepping(self._recorder, self, infos)

    def note(self, infos: list[ParamInfo]) -> None:
        self._steps.add(self._recorder.step)
        if len(self._steps) <= DELAY:
            self._learn(infos)
        groups = [one for one in self._recorder.fsdp_groups if _is_unsharded(one)]
        handles = [one for one in self._handles if one.uses_sharded_strategy and _whole(one) is not None]
        self._stepped_over.update(groups + handles)
        self._found.clear()

    def _learn(self, infos: list[ParamInfo]) -> None:
        """Who steps what, in the first steps; after these nothing is asked of it."""
        step, ids = self._with_gradient
        had = {info.id for info in infos if info.id >= 0 and info.param.grad is not None}
        self._with_gradient = self._recorder.step, (ids | had if step == self._recorder.step else had)
        self._stepped_at = caller_site()
        self._stepped.update(original.id for info in infos for original in originals(info))
        for info in infos:
            if info.id < 0:
                self._copies.setdefault(info.id, (info, set()))[1].add(self._recorder.step)

    def gathers(self, handle: Any) -> None:
        """FSDP1 is about to use a flat parameter as a whole, which is gathered where it is not there yet."""
        self._handles.add(handle)
        if handle not in self._stepped_over or not torch.is_grad_enabled():
            return
        self._stepped_over.discard(handle)
        flat, whole = self._recorder.flats.of(handle), _whole(handle)
        if flat is not None and whole is not None:
            used, shard = whole.chunk(handle.world_size)[handle.rank], handle.flat_param._local_shard
            parts = [(one.info, slice(one.offset, one.offset + one.length)) for one in flat.held]
            self._compare([(info, used[part], shard[part]) for info, part in parts])

    def used(self, group: Any) -> None:
        """A module of FSDP2's is about to be called, with this group's parameters as they are."""
        if group in self._stepped_over and torch.is_grad_enabled():
            self._stepped_over.discard(group)
            self._compare([held for one in group.fsdp_params for held in self._held(one)])

    def _held(self, fsdp_param: Any) -> Iterator[Held]:
        info = self._recorder.registry.find(fsdp_param.sharded_param)
        shard = getattr(fsdp_param.sharded_param, "_local_tensor", fsdp_param.sharded_param)
        whole = getattr(fsdp_param, "_unsharded_param", None)
        whole = getattr(whole, "_local_tensor", whole)
        if info is None or whole is None or hasattr(shard, "fsdp_pre_all_gather"):
            return
        if shard.shape != whole.shape and shard.numel():
            dim, mesh = fsdp_param.fsdp_placement.dim, fsdp_param.mesh_info
            length = -(-whole.shape[dim] // mesh.shard_mesh_size)
            whole = whole.narrow(dim, mesh.shard_mesh_rank * length, shard.shape[dim])
        yield info, whole, shard

    def _compare(self, held: list[Held]) -> None:
        """Find what is used and is not what the shard holds. Nobody waits for an accelerator here."""
        found = []
        for info, used, shard in held:
            if used.device == shard.device and used.shape == shard.shape:
                used, now = used.detach(), shard.detach().to(used.dtype)
                changed = ((used != now) & (now == now)).sum()  # but for what is no number
                if not changed.is_cpu or changed:
                    found.append((info, changed))
        if found:
            number = sum(changed for _, changed in found)
            self._found.append((self._recorder.upcoming_step, [info for info, _ in found], number, caller_site()))

    def tell(self) -> None:
        """The first backward pass of a recorded step is about to begin."""
        for step, infos, changed, site in self._found:
            if step == self._recorder.step:
                self._emit(infos, num_changed=changed, site=site)
        self._found.clear()
        if len(self._steps) == DELAY and self._recorder.step not in self._steps and not self._has_looked:
            self._has_looked = True
            self._emit(self._idle(), of_copies=True, site=self._stepped_at)
            self._emit(self._unmoved() if several_ranks() else (), unmoved=True, site=self._stepped_at)

    def _emit(self, infos: Iterable[ParamInfo], **fields: Any) -> None:
        if by_id := {info.id: info for info in infos}:
            params = self._recorder.registry.param_set([by_id[key] for key in sorted(by_id)])
            self._recorder.emit(StaleParameters, params=params, **fields)

    def _idle(self) -> Iterator[ParamInfo]:
        """What is as it was when it was first seen, while an optimizer has stepped a copy of it. On an accelerator
        nobody waits to see that."""
        for copy, steps in self._copies.values():
            if len(steps) < DELAY or not _is_plain(copy.param):
                continue
            for info, start, offset, length in copy.regions:
                if length and info.managed_by is None and _is_plain(info.param):
                    held = info.param.detach().view(-1)[start : start + length]
                    now = copy.param.detach().view(-1)[offset : offset + length].to(held.dtype)
                    if self._recorder.registry.is_as_begun(info) and bool(((held != now) & (now == now)).any()):
                        yield info

    def _unmoved(self) -> Iterator[ParamInfo]:
        """What no optimizer of this rank has, and is as it was when it was first seen: other ranks may step it."""
        for info in self._recorder.registry.infos():
            is_known = info.id in self._stepped or info.managed_by is not None
            if is_known or not (info.param.requires_grad and _is_plain(info.param)):
                continue
            if self._recorder.registry.is_as_begun(info):
                yield info

    def walk(self, roots: list[Root], site: Site | None) -> None:
        """Look at what autograd made of parameters in a step's first pass."""
        recorder = self._recorder
        if not recorder.sampling or recorder.step in self._walked or len(self._walked) >= WALKS:
            return
        self._walked.append(recorder.step)
        step, ids = self._with_gradient
        stepped = ids if step == recorder.step - 1 else set()
        if any(_MADE_IN in root.grad_fn.metadata for root in roots if root.grad_fn is not None):
            return  # all of it is older than the optimizer's step: who applies gradients a step late means it
        old: dict[int, tuple[ParamInfo, str]] = {}
        for node, leaf in _uses([root.grad_fn for root in roots if root.grad_fn is not None]):
            info = recorder.registry.find(leaf)
            is_old = node.metadata.setdefault(_MADE_IN, recorder.step) != recorder.step
            if not is_old or info is None or info.id not in stepped:
                continue
            if name_of(node).removesuffix("Backward") in COMPUTED and not recorder.registry.is_as_begun(info):
                old[info.id] = info, node.name()
        for root in roots:
            if root.grad_fn is not None:
                root.grad_fn.metadata.setdefault(_MADE_IN, recorder.step)
        if old:
            node = ", ".join(sorted({name for _, name in old.values()}))
            self._emit([info for info, _ in old.values()], node=node, in_autocast=_in_autocast(), site=site)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values lie here, all of them, one behind the other."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
    return plain and tensor.untyped_storage().size() > 0  # FSDP2 frees what it gathered


def _is_unsharded(group: Any) -> bool:
    """Whether one of FSDP2's is gathered, if only over some ranks, or about to be."""
    return group._sharded_state.name != "SHARDED" or group._all_gather_result is not None


def _whole(handle: Any) -> Tensor | None:
    """A flat parameter as a whole, where it is gathered."""
    whole = getattr(handle.flat_param, "_full_param_padded", None)
    return whole if whole is not None and whole.untyped_storage().size() else None


def _uses(nodes: list[Any]) -> Iterator[tuple[Any, Tensor]]:
    """The nodes of a graph that got a leaf, with this."""
    seen = set(nodes)
    while nodes and len(seen) < MANY:
        node = nodes.pop()
        for behind, _ in node.next_functions:
            leaf = getattr(behind, "variable", None)
            if leaf is not None:
                yield node, leaf
            elif behind is not None and behind not in seen:
                seen.add(behind)
                nodes.append(behind)


def _in_autocast() -> bool:
    """Whether a context of torch.autocast is open: torch tells how many when another one is entered."""
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting())


def install(recorder: Recorder, patches: Patches) -> None:
    stale = recorder.stale = Stale(recorder)

    def on_group(module: ModuleType) -> None:
        patches.replace(module.FSDPParamGroup, "pre_forward", functools.partial(_watch_forward, recorder, stale))

    def on_flat(module: ModuleType) -> None:
        patches.replace(module.FlatParamHandle, "unshard", functools.partial(_watch_unshard, recorder, stale))

    for name, apply in ((FSDP2, on_group), (FSDP1, on_flat)):
        patches.when_imported(name, hooking(recorder, "stale", apply))

    def opened(recorder: Recorder, current: BackwardPass, roots: list[Root], given: bool) -> None:
        if not given:
            _walk(recorder, stale, roots, current.site)

    recorder.before_first_pass.append(functools.partial(_tell, recorder, stale))
    autograd.OPEN_LISTENERS.append(opened)
    patches.on_restore(functools.partial(autograd.OPEN_LISTENERS.remove, opened))


def _watch_forward(recorder: Recorder, stale: Stale, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _used(recorder, stale, self)
        return result

    return pre_forward


def _watch_unshard(recorder: Recorder, stale: Stale, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def unshard(self: Any) -> None:
        _gathers(recorder, stale, self)
        original(self)

    return unshard


@guarded("stale")
def _stepping(_: Recorder, stale: Stale, infos: list[ParamInfo]) -> None:
    stale.note(infos)


@guarded("stale")
def _used(_: Recorder, stale: Stale, group: Any) -> None:
    stale.used(group)


@guarded("stale")
def _gathers(_: Recorder, stale: Stale, handle: Any) -> None:
    stale.gathers(handle)


@guarded("stale")
def _tell(_: Recorder, stale: Stale) -> None:
    stale.tell()


@guarded("stale")
def _walk(_: Recorder, stale: Stale, roots: list[Root], site: Site | None) -> None:
    stale.walk(roots, site)
