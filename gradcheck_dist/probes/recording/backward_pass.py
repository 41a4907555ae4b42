"""A backward pass that is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from gradcheck_dist.events import LossNumber, Site
from gradcheck_dist.probes.parameters.registry import LocalPlan, ParamInfo, Registry
from gradcheck_dist.probes.recording.deferred import made_of, number

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
