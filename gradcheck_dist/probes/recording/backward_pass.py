"""A backward pass that is under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gradcheck_dist.events import LossNumber, Site
from gradcheck_dist.probes.parameters.regions import main_grad_of
from gradcheck_dist.probes.parameters.registry import LocalPlan, ParamInfo, Registry, originals
from gradcheck_dist.probes.recording.deferred import made_of, number
from gradcheck_dist.probes.recording.read_before import ReadBefore

if TYPE_CHECKING:
    from gradcheck_dist.probes.activations.ways import PassHooks
    from gradcheck_dist.probes.parameters.places import Place


class TokenWeights(NamedTuple):
    """The weights of a loss's tokens in one pass, as 0-d tensors where the gradient lies."""

    mean: Tensor
    low: Tensor
    high: Tensor
    num_tokens: Tensor


@dataclass
class ReducedTerm:
    """One mean or sum over elements, times `num_factors` numbers, of which some divide by whole ones (an int and a
    list, or a Later of them). `arrived` is its gradient, `mean_weight` the same where it is a mean of errors, distances
    or margins, `elements` what it goes over: fields of a ReducedGradient. `beneath`: what multiplies each beside a
    weight of its own, `num_kept` how many masks keep; `of_sums`: of elements that are sums themselves, `num_sums` of
    them where they are sums of tokens with weights of their own, `of_means`: which lengths divide; `of_one`: a tensor
    of a single element is among the weights."""

    op: str
    num_factors: Any
    divided_by: Any = None
    arrived: Tensor | None = None
    mean_weight: Tensor | None = None
    elements: dict[str, Any] = field(default_factory=dict)
    beneath: Tensor | None = None
    reduced_by: str | None = None
    num_kept: int | Tensor | None = None
    of_sums: bool = False
    num_sums: int | Tensor | None = None
    of_means: bool = False
    of_one: bool = False

    @property
    def told_of_weighted(self) -> dict[str, Any]:
        """The fields that tell of elements with weights of their own."""
        if self.beneath is None:
            return {}
        weight = number(self.beneath.detach().double())
        told = {"num_factors": self.num_factors, "reduced_by": self.reduced_by, "beside_weights": weight}
        told |= {"num_kept": self.num_kept} if self.num_kept is not None else {}
        told |= {"batch_of_one": True} if self.of_one else {}
        told |= {"of_means": True} if self.of_means else {}
        return told | ({"num_reduced": self.num_sums} if self.num_sums is not None else {})

    @property
    def told(self) -> dict[str, Any]:
        """The fields of a ReducedGradient."""
        mean_weight = None if self.mean_weight is None else number(self.mean_weight)
        numbers = {"num_factors": self.num_factors, "divided_by": self.divided_by}
        return {"mean_weight": mean_weight, **numbers, **self.elements}


@dataclass
class NumbersBefore:
    """The numbers that multiply and divide a loss in a sum of several; None for one that is not read, a tensor for one
    that lies on an accelerator."""

    multipliers: list[float | Tensor | None]
    divisors: list[float | Tensor | None]


def _sum_of_products(numbers: list[float | None], shape: list[tuple[int, int]]) -> float | None:
    """Of losses, each times so many numbers and divided by so many behind these; None where one is not read."""
    come, total = iter(numbers), 0.0
    for num_multipliers, num_divisors in shape:
        multipliers = [next(come) for _ in range(num_multipliers)]
        divisors = [next(come) for _ in range(num_divisors)]
        if None in multipliers or not all(divisors):
            return None
        total += prod(one for one in multipliers if one is not None) / prod(one for one in divisors if one)
    return total


class BackwardPass:
    """A backward pass that is under way: the leaves of one contribution are arriving."""

    __slots__ = (
        "accumulated",
        "added_to",
        "armed",
        "arrived",
        "before",
        "before_armed",
        "by_hand",
        "computed",
        "direct",
        "first_of_forward",
        "folded",
        "forward",
        "given",
        "handed_over",
        "handles",
        "held",
        "hooks",
        "inner",
        "inputs",
        "inside_losses",
        "label_hash",
        "leaves",
        "logits",
        "microbatch",
        "num_attached",
        "num_embedded",
        "numbers",
        "on_its_way",
        "onto_itself",
        "other_losses",
        "part_of",
        "picked",
        "read_early",
        "reduce_groups",
        "reduce_ops",
        "reduced",
        "reduced_inside",
        "reduced_over",
        "returned",
        "root_edge",
        "root_loss",
        "seq",
        "sharding",
        "site",
        "smoothed",
        "soft",
        "stage",
        "start_ns",
        "started_from",
        "sync",
        "targets",
        "thread",
        "touched",
        "unsynced",
        "whole",
    )

    def __init__(self, seq: int, microbatch: int, stage: int | None, site: Site | None) -> None:
        self.seq = seq
        self.thread = get_ident()
        self.microbatch = microbatch
        self.stage = stage
        self.site = site
        self.start_ns = time.perf_counter_ns()
        self.sync: bool | None = None
        self.unsynced: str | None = None  # why the wrapper of `sync` did not reduce
        self.touched: dict[int, ParamInfo] = {}
        self.leaves: list[LocalPlan] = []  # sampled into their slots; rows are made when the pass is over
        self.started_from: Any = None  # the gradients that the caller gave, while the pass begins
        self.given: list[Tensor] | None = None  # what a pipeline's stage was given; None where nobody told
        self.handles: list[Any] = []  # of hooks that are taken off when the pass is over
        self.inner = 0  # calls of torch.autograd.grad that are under way inside of backward functions
        self.inside_losses = 0  # functions that are losses themselves, and whose backward is under way
        self.held: dict[int, list[tuple[ParamInfo, Tensor]]] = {}  # by parameter: what these were given
        self.hooks: PassHooks | None = None  # on activations that all gradients of the pass go through
        self.armed: dict[int, int] = {}  # wrapper id -> seq of its Reduce
        self.before_armed: dict[int, Iterator[int]] = {}  # wrapper id -> numbers for what hooks reduce before it does
        self.handed_over: set[int] = set()  # parameters whose gradient a wrapper has, to reduce it
        self.accumulated: set[int] = set()  # wrappers with a parameter whose AccumulateGrad ran
        self.reduce_ops: set[str] = set()  # collectives that a user's communication hook called
        self.reduce_groups: dict[tuple[int, ...], int] = {}  # over these ranks, so many elements
        self.reduced_over: dict[tuple[int, ...], dict[int, ParamInfo]] = {}  # whose gradients these are
        self.read_early: set[int] = set()  # parameters with which an optimizer stepped before their wrapper reduced
        self.by_hand: set[int] = set()  # parameters whose gradient a hook of the user's reduced in this pass
        self.sharding: dict[int, tuple[ParamInfo, int]] = {}  # what FSDP reduces now: parameter, seq of its Reduce
        self.on_its_way: Place | None = None  # what FSDP has reduced and hands to a hook, before it is a gradient
        self.reduced_inside: dict[int, tuple[ParamInfo, int]] = {}  # by autograd itself: parameter, seq of its Reduce
        self.added_to: dict[int, tuple[ParamInfo, Tensor]] = {}  # by functions: the largest element that these got
        self.folded: dict[int, tuple[LocalPlan, Tensor]] = {}  # what arrives at these holds what was there before, too
        self.onto_itself: dict[int, ParamInfo] = {}  # what arrives at these lies in `.grad`, to which it is added
        self.num_embedded = 0  # embeddings whose tokens were recorded
        self.num_attached = 0  # terms that functions attach to activations
        self.returned = False  # to the caller, and not accumulated
        self.forward: int | None = None  # the one that it differentiates, where several passes may
        self.first_of_forward: int | None = None  # the number of the first pass that differentiated the same forward
        self.other_losses = 0  # losses in the graph besides the recorded ones
        self.part_of: dict[int, int] = {}  # by loss: of which larger one, where it is a part of one
        self.picked: dict[int, Tensor] = {}  # by loss: how many of its largest elements count, 0-d
        self.logits: dict[int, int] = {}  # by loss: which logits, where other losses compare them, too
        self.arrived: set[int] = set()  # losses that got their gradient
        self.direct: set[int] = set()  # losses that the roots are computed from, by way of no other loss
        self.computed = False  # a loss's weight in the root is a function of the data
        self.inputs: int | None = None  # a checksum of what the first module was given since the pass before
        self.targets: int | None = None  # and of what a loss without labels compares with
        self.soft = False  # its loss has soft targets, and no labels
        self.label_hash: int | None = None  # of the labels whose loss went backward; in impulse mode only
        self.smoothed: dict[int, TokenWeights | None] = {}  # by loss: what arrived at its labels, where these are
        self.reduced: list[ReducedTerm] = []  # the means and sums over elements that the root adds up
        self.whole: Tensor | None = None  # what arrived at the sum of several
        self.before: list[tuple[int | None, NumbersBefore]] = []  # by loss; None for what counts no tokens
        self.numbers: list[LossNumber] = []  # which multiply all that the pass begins at
        self.root_loss: str | None = None  # what a scalar root is made of, when it is no recorded loss
        self.root_edge: tuple[Any, int] = (None, 0)  # the node of the autograd graph that made that root, its output

    def holds(self, info: ParamInfo, grad: Tensor) -> bool:
        """Whether a gradient is given to a backward function, which may bring it itself later in this pass."""
        if self.inner:
            self.held.setdefault(info.id, []).append((info, grad.detach()))
        else:
            self.held.pop(info.id, None)
        return bool(self.inner)

    def not_brought(self) -> list[tuple[ParamInfo, Tensor]]:
        """What such functions were given for parameters that nothing else arrived at."""
        return [one for held in self.held.values() for one in held]

    def told(self, registry: Registry) -> dict[str, Any]:
        """Fields of its Backward, now that it ends."""
        params = registry.param_set(list(self.touched.values()))
        return {
            "seq": self.seq,
            "site": self.site,
            "microbatch": self.microbatch,
            "stage": self.stage,
            "sync": self.sync,
            "unsynced": self.unsynced,
            "params": params,
            "duration_ns": time.perf_counter_ns() - self.start_ns,
            "returned": self.returned,
            "first_of_forward": self.first_of_forward,
            "onto_itself": registry.param_set(list(self.onto_itself.values())) if self.onto_itself else None,
            "inputs_hash": self.inputs,
        }

    def told_of_sum(self, loss_id: int) -> dict[str, Any]:
        """Fields of a LossGradient: what stands before a loss in a sum of several, and before all of these together,
        what it is a part of and what it shares with others, and what multiplies all of the pass."""
        numbered: dict[str, dict[int, Any]]
        numbered = {"part_of": self.part_of, "logits": self.logits, "num_picked": self.picked}
        part = {name: of_losses[loss_id] for name, of_losses in numbered.items() if loss_id in of_losses}
        part |= {"numbers": self.numbers} if self.numbers else {}
        own = [one for known, one in self.before if known == loss_id]
        if len(own) != 1:
            return part  # in no sum, or several times in one
        shape = [(len(one.multipliers), len(one.divisors)) for _, one in self.before]
        every = [number for _, one in self.before for number in (*one.multipliers, *one.divisors)]
        return part | {
            "multipliers": made_of(own[0].multipliers, list),
            "divisors": made_of(own[0].divisors, list),
            "sum_before": made_of(every, lambda numbers: _sum_of_products(numbers, shape)),
        }

    def told_of_elements(self) -> dict[str, Any]:
        """Fields of a LossGradient whose weight is a function of the data, or one number for each token: what the one
        mean or sum of the pass goes over says what it weighs."""
        if len(self.reduced) != 1:
            return {}
        only = self.reduced[0]
        is_told = self.computed or not only.of_sums or only.num_sums is not None
        weighted = only.told_of_weighted if is_told else {}
        return weighted | (only.told if self.computed else {})

    def not_reduced(self) -> list[ParamInfo]:
        """The parameters whose gradient buffers hold what the pass itself has left in them."""
        return [
            info
            for info in self.touched.values()
            if info.managed_by != "fsdp" and info.wrapper not in self.armed and info.id not in self.by_hand
        ]


class ReadGradients:
    """Whose gradients optimizers read. What nobody empties afterwards is there when the next step begins, and may still
    be there some steps later, where the optimizer that reads it comes in turn with another one."""

    def __init__(self) -> None:
        self._step = -1
        self._read: list[list[ParamInfo]] = []
        self._ids: set[int] = set()
        self._kept: tuple[int, dict[int, ParamInfo]] = (-1, {})
        self._emptied: set[int] = set()
        self.before = ReadBefore()

    def note(self, step: int, infos: list[ParamInfo]) -> None:
        """An optimizer reads the gradients of these parameters."""
        if self._step != step:
            self._read, self._ids, self._step = [], set(), step
        self._read.append(infos)
        self._ids.update([info.id for info in infos])
        if self._emptied:
            self._emptied -= self._ids

    def recall(self, step: int, find: Callable[[Tensor], ParamInfo | None]) -> None:
        """Note what was read in `step` if nothing but `before` of it was recorded: as gradients that may be left, only
        those that still are what was read."""
        found = [(info, is_still) for param, is_still in self.before.take(step) if (info := find(param)) is not None]
        if found:
            self.note(step, [info for info, is_still in found if is_still])
            self._ids.update([info.id for info, _ in found])

    def in_step(self, step: int) -> set[int]:
        """The ids of the parameters whose gradients were read in this step."""
        return self._ids if self._step == step else set()

    def emptied(self, infos: list[ParamInfo]) -> None:
        """The gradients of these parameters are emptied."""
        ids = [info.id for info in infos]
        self._emptied.update(ids)
        for key in ids if self._kept[1] else ():
            self._kept[1].pop(key, None)

    @property
    def num_emptied(self) -> int:
        return len(self._emptied)

    def are_emptied(self, ids: Iterable[int]) -> bool:
        """Whether all of these were read by an optimizer, and emptied since."""
        return self._ids.issuperset(ids) and self._emptied.issuperset(ids)

    def left(self, step: int, known: Callable[[], list[ParamInfo]]) -> list[ParamInfo]:
        """Those that were read until `step` and still have that gradient, in the model's order, without optimizers' own
        copies; where optimizers read such (shards, float32 copies), all `known` parameters with a gradient, of which
        they may be made. To be asked once a step, when the next one begins."""
        since, kept = self._kept
        left = dict(kept) if since == step else {}
        if self._step == step:
            read = [info for infos in self._read for info in infos]
            left |= {info.id: info for info in read if info.id < 0 or info.param.grad is not None}
        of_copies = any(key < 0 for key in left)
        left = {key: info for key, info in left.items() if key >= 0 and info.param.grad is not None}
        # On an accelerator nobody waits to see whether a gradient was filled with zeros by hand.
        self._kept = step + 1, {key: info for key, info in left.items() if _is_there(info.param.grad)}
        if of_copies:
            left |= {one.id: one for one in known() if one.id not in left and _is_there(one.param.grad)}
        return [left[key] for key in sorted(left)]

    def in_buffers(self, step: int) -> list[tuple[ParamInfo, Tensor]]:
        """Buffers of parameters that were read in `step` which still hold something, though `.grad` is empty."""
        read = [info for infos in self._read if self._step == step for info in infos]
        of_model = [one for info in read for one in (originals(info) if info.regions else (info,))]
        may = {one.id: one for one in of_model if "main_grad" in vars(one.param)}
        held = [(one, main_grad_of(one)) for _, one in sorted(may.items()) if one.param.grad is None]
        return [(info, kept) for info, kept in held if kept is not None and (not kept.is_cpu or _is_there(kept))]


def _is_there(grad: Tensor | None) -> bool:
    return grad is not None and grad.device.type == "cpu" and grad.layout is torch.strided and bool(grad.any())
