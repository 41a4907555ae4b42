"""Whether ranks hold copies of one parameter: a few values of each, in the step in which it is first seen.

Tensors of one name and one shape may be copies, and share one gradient, or shards and experts, and share none. Their
gradients do not tell which, their values do. They are read when a backward pass begins, when whatever is broadcast,
loaded or made lazily is in place, or as an optimizer shows them that no module has shown, and again when an optimizer
has stepped, for values may be moved apart during a step on purpose (a perturbation that is taken back).

Experts that were drawn from one seed begin alike, as copies do. What tells them is where they stand: they are called
between two exchanges of activations (all-to-all), and nothing that ranks share is called there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives, distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcheck_dist.events import ParamValues
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.optimizers.params import NEW_LISTENERS
from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.dynamo import untraced
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.world import several_ranks
from gradcheck_dist.stats.sampling import sample_positions

NUM_VALUES = 16
"""Of each parameter."""


class Copies:
    """Which parameters were looked at."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._step = -1
        self._new: list[ParamInfo] = []
        self._num_known = 0
        self._num_exchanges = 0
        self._with: set[int] = set()
        self._places: dict[int, int] = {}  # by parameter, how many exchanges came before its module was called

    @property
    def counts(self) -> bool:
        """Whether exchanges count: modules may have their places before the first recorded step."""
        return self.recorder.samples_upcoming or not self._num_known

    def exchanged(self, tensor: Any, group: Any) -> None:
        """Ranks are about to exchange a tensor by all-to-all: activations, outside of backward passes."""
        parts = tensor if isinstance(tensor, list | tuple) else [tensor]
        if self.recorder.current is None and any(
            isinstance(part, Tensor) and part.is_floating_point() for part in parts
        ):
            self._num_exchanges += 1
            self._with.update(ranks_of(group))

    def called(self, module: nn.Module) -> None:
        """A module is called, in a forward pass in which its parameters are not known yet."""
        for param in module._parameters.values():
            if param is not None:
                self._places.setdefault(id(param), self._num_exchanges)

    def begins(self) -> None:
        """A backward pass begins."""
        if self.look():
            self._num_exchanges = 0

    def look(self) -> bool:
        """Look at the parameters that are new, if anybody asks."""
        recorder = self.recorder
        if not recorder.sampling or not several_ranks():
            return False
        if self._step != recorder.step:
            self._step, self._new = recorder.step, []
        infos = recorder.registry.infos()
        if len(infos) > self._num_known:
            new, self._num_known = infos[self._num_known :], len(infos)
            found = [info for info in new if info.param.requires_grad and local_part(info) is not None]
            self._new += found
            self._look(found, after=False)
        return True

    def is_over(self) -> None:
        """An optimizer has stepped."""
        if self._step == self.recorder.step and self._new:
            self._look(self._new, after=True)

    def _look(self, infos: list[ParamInfo], *, after: bool) -> None:
        held = [(info, local) for info in infos if (local := local_part(info)) is not None]
        if not held or len({local.device for _, local in held}) > 1:
            return
        parts = [local.take(some_positions(local)).float() for _, local in held]
        record = functools.partial(
            ParamValues,
            params=tuple(info.id for info, _ in held),
            counts=tuple(len(part) for part in parts),
            after=after,
            exchanges=self._exchanges([info for info, _ in held]),
            exchanged_with=tuple(sorted(self._with)),
        )
        self.recorder.copies.bring(torch.cat(parts), functools.partial(self._write, record))

    def _exchanges(self, infos: list[ParamInfo]) -> tuple[int, ...]:
        found = tuple(self._places.get(id(info.param), 0) for info in infos)
        return found if any(found) else ()

    def _write(self, record: Any, host: Tensor) -> None:
        self.recorder.writer.append(record(values=host.contiguous().numpy().tobytes()))


def install(recorder: Recorder, patches: Patches) -> None:
    copies = Copies(recorder)

    def begin(recorder: Recorder, *_: Any) -> None:
        begun(recorder, copies)

    def after(*_: Any) -> None:
        over(recorder, copies)

    def watch(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def all_to_all(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and copies.counts:
                exchanged(recorder, copies, signature, args, kwargs)
            return original(*args, **kwargs)

        return all_to_all

    for module, name in (
        (distributed_c10d, "all_to_all_single"),
        (distributed_c10d, "all_to_all"),
        (dist, "all_to_all_single"),
        (dist, "all_to_all"),
        (_functional_collectives, "all_to_all_single"),
    ):
        patches.replace(module, name, watch)

    def call(_: Recorder, module: nn.Module, __: Sequence[Any]) -> None:
        called(recorder, copies, module)

    autograd.CALL_LISTENERS.append(call)
    patches.on_restore(lambda: autograd.CALL_LISTENERS.remove(call))
    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(register_optimizer_step_post_hook(untraced(after)).remove)

    def shown(recorder: Recorder) -> None:
        look(recorder, copies)

    NEW_LISTENERS.append(shown)
    patches.on_restore(lambda: NEW_LISTENERS.remove(shown))


@guarded("copies")
def exchanged(
    recorder: Recorder, copies: Copies, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    call = signature.bind(*args, **kwargs).arguments
    sent = next(call[name] for name in ("input", "input_tensor_list", "self") if name in call)
    copies.exchanged(sent, call.get("group"))


@guarded("copies")
def called(recorder: Recorder, copies: Copies, module: nn.Module) -> None:
    copies.called(module)


@guarded("copies")
def begun(recorder: Recorder, copies: Copies) -> None:
    copies.begins()


@guarded("copies")
def look(recorder: Recorder, copies: Copies) -> None:
    copies.look()


@guarded("copies")
def over(recorder: Recorder, copies: Copies) -> None:
    copies.is_over()


def local_part(info: ParamInfo) -> Tensor | None:
    """What this rank holds of a parameter; None where that is nothing, or not what it was when it was first seen (a
    tensor that is whole only while it is used)."""
    param = info.param
    local: Tensor = getattr(param, "_local_tensor", param).detach()
    if local.is_meta or not local.numel() or not local.is_floating_point() or not local.untyped_storage().size():
        return None
    return local if tuple(param.shape) == info.shape else None


def ranks_of(group: Any) -> list[int]:
    """The global ranks of a group, however it is named: a process group or its name, a mesh, a list of ranks."""
    if isinstance(group, str):
        group = getattr(distributed_c10d, "_resolve_process_group")(group)  # noqa: B009
    if isinstance(group, list) and all(isinstance(rank, int) for rank in group):
        return group
    if isinstance(group, tuple) and len(group) == 2:  # a mesh and one of its dimensions
        group = group[0].get_group(group[1])
    found = group.get_group() if hasattr(group, "get_group") else group
    return dist.get_process_group_ranks(found or dist.group.WORLD)


def some_positions(local: Tensor) -> Tensor:
    return torch.as_tensor(sample_positions("local", local.numel(), NUM_VALUES), device=local.device)
