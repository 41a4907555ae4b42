"""Parameters that a function of the trainer's own gathers from all ranks in forward and reduces in backward (ZeRO 3 by
hand, torch.distributed.nn's all_gather of a shard), or hands on and reduces in backward.

What arrives at such a parameter is a sum over ranks already. A rank's contribution is what arrives at the function's
outputs; where it gathers, for the parts of all ranks, which are recorded as one parameter, as FSDP's are. That a
function gathers is seen in what it gives, whatever it calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcheck_dist.events import AFTER, GATHERED, LEAF
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.probes.parameters.registry import LocalPlan, ParamInfo
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.sites import defined_at
from gradcheck_dist.stats.sampling import sample_positions

NUM_COMPARED = 64
ROUNDED = 2.0**-7
"""By how much a value differs at most that was cast to bfloat16 on its way."""
_IN_ORDER = {"View", "UnsafeView", "ReshapeAlias", "ToCopy", "Clone", "Alias", "Squeeze", "Unsqueeze"}
"""Torch's functions that leave elements in their order."""


class Part(NamedTuple):
    """A leaf, and where it begins in the flat tensor that is gathered."""

    leaf: Tensor
    offset: int


class Shard(NamedTuple):
    """A parameter of which this rank holds a part: `held` is that part, which an optimizer steps."""

    info: ParamInfo
    held: ParamInfo
    part: Part


class Reduction(NamedTuple):
    """A collective that combines: `op` as "sum" or "avg", and the tensor that holds its result."""

    op: str
    ranks: tuple[int, ...]
    made: Tensor


class Gather(NamedTuple):
    """One input of a function, of type `dtype`, and its outputs: what autograd numbers these, and their shapes. `dim`:
    along which the parts of all ranks lie in a single output; None where they lie one after the other."""

    ranks: tuple[int, ...]
    shards: list[Shard]
    numbers: list[int]
    shapes: list[tuple[int, ...]]
    dim: int | None
    dtype: torch.dtype


Contribution = tuple[Shard, LocalPlan, Tensor]
"""Sampled elements of what one rank contributes to the parts of all ranks."""


class Gathered:
    """The parameters whose parts functions gather."""

    def __init__(self) -> None:
        self.shards: dict[int, Shard] = {}
        self.unfollowed: dict[type, int] = {}  # functions that are not followed, and the last step in which they ran
        self.doubted: dict[type, set[int]] = {}  # functions, and the ids of leaves that may be parameters, or none
        self._running: list[Reduction | None] | None = None

    def shard(self, recorder: Recorder, part: Part, ranks: tuple[int, ...], length: int) -> Shard | None:
        """A part of a parameter of `length` elements; None where it is known as another one."""
        found = self.shards.get(id(part.leaf))
        if found is None:
            size = part.leaf.numel()
            start = ranks.index(dist.get_rank()) * size
            info = recorder.registry.as_part(part.leaf, length, start, max(0, min(size, length - start)))
            held = recorder.registry.find(part.leaf)
            if info is None or held is None:
                return None
            info.managed_by = "fsdp"  # sampled by its reductions
            recorder.discovery.takes_over(part.leaf, info.param)
            found = self.shards[id(part.leaf)] = Shard(info, held, part)
        return found if found.info.shape == (length,) else None

    def tell(self, recorder: Recorder) -> None:
        """The step ends: functions that are not followed, or whose leaves turned out to be parameters. What ran in
        forward came before the step began, and would have been told as the last one's."""
        doubted, self.doubted = self.doubted, {}
        for cls, leaves in doubted.items():
            if recorder.registry.knows(leaves):
                not_followed(recorder, cls)
        for cls, step in self.unfollowed.items():
            if step == recorder.step:
                reason = f"{cls.__name__} combines parameters of several ranks in an order that is not known"
                recorder.status(GATHERED, False, f"{reason}: what its backward gives them is not followed")

    @property
    def is_running(self) -> bool:
        """Whether the backward of a function that gathers is under way."""
        return self._running is not None

    def begins(self) -> None:
        """Such a backward is about to run."""
        self._running = []

    def calls(self, reduction: Reduction | None) -> None:
        """It calls a collective. `reduction`: what that combines."""
        running = self._running
        if running is None:
            return
        last = running[-1] if running else None
        if last is not None and reduction is not None and last.made is reduction.made and last[:2] == reduction[:2]:
            return  # the older name of a collective calls the newer one
        running.append(reduction)

    def ends(self) -> list[Reduction | None]:
        """What it called."""
        called, self._running = self._running or [], None
        return called


def install(recorder: Recorder, patches: Patches) -> None:
    recorder.gathered = Gathered()
    autograd.CLOSE_LISTENERS.append(complete)
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(complete))
    patches.on_restore(lambda: setattr(recorder, "gathered", None))


@guarded(GATHERED)
def not_followed(recorder: Recorder, cls: type, leaves: Sequence[Tensor] = ()) -> None:
    """Note a function that communicates and is applied to a parameter, in a way that is not known.

    Args:
        leaves: what it is applied to, where that may be no parameter but what another rank sent, or a cut: that is
            known behind the optimizer's step.
    """
    gathered: Gathered | None = recorder.gathered
    if gathered is None:
        return
    if leaves and not any(isinstance(leaf, nn.Parameter) for leaf in leaves):
        gathered.doubted.setdefault(cls, set()).update(map(id, leaves))
    else:
        gathered.unfollowed[cls] = recorder.upcoming_step


@guarded(GATHERED)
def watch(
    recorder: Recorder,
    cls: Any,
    ranks: tuple[int, ...],
    given: Sequence[Tensor],
    made: Sequence[Tensor],
    communicates: bool,
) -> bool:
    """Follow a function that was applied to parameters and gave the parts of all ranks, or them themselves. False: it
    did something else.

    Args:
        given: its inputs with a gradient, of parts of this rank.
        made: its outputs. Of one input one for each rank, or one with the parts of all ranks; of several inputs one
            such for each.
        communicates: whether it called a collective in forward. Where not, its backward may.
    """
    gathered: Gathered | None = recorder.gathered
    if gathered is None or len(given) not in (1, len(made)) or (communicates and len(ranks) < 2):
        return False
    pairs = [(given[0], made)] if len(given) == 1 else [(one, [other]) for one, other in zip(given, made, strict=True)]
    find = _gather if communicates else _handed_on
    gathers = [gather for one, outputs in pairs if (gather := find(recorder, gathered, ranks, one, outputs))]
    if len(gathers) < len(pairs):
        return False
    node: Any = made[0].grad_fn
    contributions: list[Contribution] = []

    def begins(grad_outputs: Sequence[Tensor | None]) -> None:
        gathered.begins()
        contributions.clear()
        for gather in gathers:
            contributions.extend(arrived(recorder, gather, [grad_outputs[number] for number in gather.numbers]))

    def ends(grad_inputs: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
        called = gathered.ends()
        alone = bool(called) and all(one is not None and len(one.ranks) < 2 for one in called)
        if communicates or (called and not alone):
            grads = [grad for grad in grad_inputs if grad is not None]
            reduced(recorder, cls, gathers, contributions, called, grads)

    node.register_prehook(kept_away(recorder, GATHERED, begins))
    node.register_hook(kept_away(recorder, GATHERED, ends))
    return communicates


def _gather(
    recorder: Recorder, gathered: Gathered, ranks: tuple[int, ...], given: Tensor, made: Sequence[Tensor]
) -> Gather | None:
    parts = parts_of(given)
    size, length = given.numel(), sum(one.numel() for one in made)
    if parts is None or len(made) not in (1, len(ranks)) or not size * (len(ranks) - 1) < length <= size * len(ranks):
        return None
    if len(parts) > 1 and length < size * len(ranks):
        return None  # of several parameters, which of them the end is missing of is not known
    dim = _grown(given, made[0], len(ranks)) if len(made) == 1 else None
    known = all(id(part.leaf) in gathered.shards for part in parts)
    if not known and not _lie_in_order(given, made, dim, len(ranks), ranks.index(dist.get_rank())):
        return None
    lengths = [length] if len(parts) == 1 else [part.leaf.numel() * len(ranks) for part in parts]
    found = [gathered.shard(recorder, part, ranks, own) for part, own in zip(parts, lengths, strict=True)]
    shards = [shard for shard in found if shard is not None]
    if len(shards) < len(found):
        return None
    return Gather(ranks, shards, [one.output_nr for one in made], [tuple(one.shape) for one in made], dim, given.dtype)


def _handed_on(
    recorder: Recorder, _: Gathered, ranks: tuple[int, ...], given: Tensor, made: Sequence[Tensor]
) -> Gather | None:
    """Of a function that gives a parameter on as it is; its backward may reduce."""
    parts = parts_of(given)
    if parts is None or len(parts) > 1 or len(made) > 1 or made[0].shape != given.shape:
        return None
    info = recorder.registry.find(parts[0].leaf)
    if info is None or info.regions or info.managed_by is not None:
        return None
    return Gather(ranks, [Shard(info, info, parts[0])], [made[0].output_nr], [tuple(made[0].shape)], None, given.dtype)


def parts_of(tensor: Tensor) -> list[Part] | None:
    """The parameters of which a tensor has all elements one after the other; None where it is made of anything else."""
    parts: list[Part] = []
    offset = 0
    stack: list[Any] = [tensor if tensor.is_leaf else tensor.grad_fn]
    while stack:
        node = stack.pop()
        name = "" if node is None or isinstance(node, Tensor) else node.name()
        leaf = node if isinstance(node, Tensor) else node.variable if name.endswith("AccumulateGrad") else None
        if leaf is not None:
            if not is_plain(leaf) or not leaf.is_contiguous():
                return None
            parts.append(Part(leaf, offset))
            offset += leaf.numel()
        elif name.startswith("CatBackward") and node._saved_dim == 0:
            stack += [one for one, _ in reversed(node.next_functions)]
        elif name.rstrip("0123456789").removesuffix("Backward") in _IN_ORDER:
            stack.append(node.next_functions[0][0])
        else:
            return None
    return parts if parts and offset == tensor.numel() else None


def _grown(given: Tensor, made: Tensor, size: int) -> int | None:
    """The dimension, but for the first, along which a tensor has the parts of `size` ranks."""
    unlike = [dim for dim, (one, other) in enumerate(zip(given.shape, made.shape, strict=False)) if one != other]
    along = len(unlike) == 1 and given.dim() == made.dim() and made.shape[unlike[0]] == size * given.shape[unlike[0]]
    return unlike[0] if along and unlike[0] > 0 else None


def _one_after_the_other(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The parts of all ranks in a tensor that holds them, end to end."""
    whole = tensor.detach()
    return whole.reshape(-1) if dim is None else torch.cat([part.reshape(-1) for part in whole.chunk(size, dim)])


def _lie_in_order(given: Tensor, made: Sequence[Tensor], dim: int | None, size: int, index: int) -> bool:
    """Whether this rank's part is where it belongs, by some of its values. Read once a parameter."""
    flat, start = given.detach().reshape(-1), index * given.numel()
    if len(made) > 1:
        own, start = made[index].detach().reshape(-1), 0
    else:
        own = _one_after_the_other(made[0], dim, size)
    count = min(len(flat), len(own) - start)
    if count <= 0:
        return True
    where = torch.from_numpy(sample_positions("gathered", count, NUM_COMPARED)).to(flat.device)
    return bool(torch.allclose(own[start + where].float(), flat[where].float(), rtol=ROUNDED, atol=0.0))


def arrived(recorder: Recorder, gather: Gather, grads: Sequence[Tensor | None]) -> list[Contribution]:
    """This rank's contributions to the parts of all ranks, before backward may change them in place."""
    one = next((grad for grad in grads if grad is not None), None)
    if recorder.current is None or one is None or not all(grad is None or is_plain(grad) for grad in grads):
        return []
    pieces = [one.new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, gather.shapes, strict=True)]
    size = len(gather.ranks)
    whole = _one_after_the_other(pieces[0], gather.dim, size) if len(pieces) == 1 else torch.stack(pieces).reshape(-1)
    found: list[Contribution] = []
    for shard in gather.shards:
        (leaf, offset), own = shard.part, whole
        if len(gather.shards) > 1:
            own = whole.view(size, -1)[:, offset : offset + leaf.numel()].reshape(-1)
        if recorder.sampling and shard.info.active:
            plan = recorder.registry.region_plan(Region(shard.info, 0, 0, own.numel()), own.device)
            found.append((shard, plan, own.detach().take(plan.indices)))
    return found


def reduced(
    recorder: Recorder,
    cls: Any,
    gathers: list[Gather],
    contributions: list[Contribution],
    called: list[Reduction | None],
    grads: list[Tensor],
) -> None:
    """A function's backward is through: tell what it was given, and its reductions, once a pass."""
    current = recorder.current
    if current is None:
        return
    for shard, plan, values in contributions:
        recorder.keep(current.seq, LEAF, plan, values)
        current.touched[shard.info.id] = shard.info
    how: dict[str, Any] = {"impl": GATHERED, "hook": cls.__name__, "op": "sum"}
    if not cls.__module__.startswith("torch."):
        how["site"] = defined_at(cls.backward)
    single = called[0] if len(called) == len(grads) == len(gathers) == 1 else None
    if single is not None:
        how |= {"op": single.op, "post_divide": _divisor(single.made, grads[0])}
    for gather in gathers:
        ranks = next((one.ranks for one in called if one is not None), gather.ranks)
        types = [gather.dtype, *(values.dtype for _, _, values in contributions)]
        how["dtype"] = str(max(types, key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")
        for info, held, _ in gather.shards:
            if held.id not in current.reduced_inside:
                seq = recorder.next_seq()
                current.reduced_inside[held.id] = (held, seq)
                current.by_hand.add(held.id)
                recorder.emit_reduce(seq, [info], group=ranks, **how)


def _divisor(made: Tensor, given: Tensor) -> Tensor | None:
    """By what one number a function divided the result of its collective, shape (); 1 where by none."""
    if made.numel() != given.numel():
        return None
    before, after = (one.detach().reshape(-1)[:NUM_COMPARED].double() for one in (made, given))
    ratio = (before * after).sum() / (after * after).sum()
    whole = ratio.round()
    ratio = torch.where((ratio - whole).abs() <= 1e-5 * whole.abs(), whole, ratio)
    return torch.where((before - ratio * after).norm() <= 1e-5 * before.norm(), ratio, torch.ones_like(ratio))


@guarded(GATHERED)
def complete(recorder: Recorder, current: BackwardPass) -> None:
    """The results lie in `.grad` when the pass is over."""
    if recorder.gathered is not None:
        for held, seq in list(current.reduced_inside.values()):
            if held.id in current.by_hand:
                recorder.sample_grads(seq, AFTER, [held])
