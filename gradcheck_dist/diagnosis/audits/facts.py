"""Faults that leave no pattern in the weights: what a rule can look at, and what it remarks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.unlike import Mixed, mixed
from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.norms.effect import Effect
from gradcheck_dist.diagnosis.norms.hand_norms import HandNorm
from gradcheck_dist.diagnosis.norms.scaled_clips import ScaledClip
from gradcheck_dist.diagnosis.norms.step_norms import StepNorms
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.events import Event
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.loss_backwards import OwnBackward
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.ledger.transit import Transits

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class StepFacts:
    """One step, as far as it was recorded. `found` are the codes of what the weights show, `on_the_way` is what
    happened to gradients between pipeline stages."""

    context: StepContext
    data: StepData
    contributions: Contributions
    norms: StepNorms
    held: list[Held]
    found: frozenset[str]
    on_the_way: Transits
    waiting: bool = False
    """Whether lines changed gradients by numbers that other steps have to tell from constants."""
    made_up: bool = False
    """Whether weights were off at the loss that an exchange of activations may make up for."""
    as_measured: bool = False
    """Whether the weights are right up to coefficients alone, which are what was measured."""
    by_norm: HandNorm | None = None
    """The clip by hand that took a wrong norm, of which the weights are freed."""
    scaled: ScaledClip | None = None
    """The clip by hand of gradients that carried a loss scale, of which the weights are freed."""
    own_backwards: tuple[OwnBackward, ...] = ()
    """Backwards of loss functions that are not the derivative, and with which the weights are wrong."""
    effect_of_backwards: Effect | None = None
    """What they alone do to the gradient."""

    @cached_property
    def mixed(self) -> Mixed:
        """Which reductions join tensors that are no copies of one another."""
        return mixed(self.data, self.contributions.coordinate)

    @cached_property
    def _keys(self) -> dict[tuple[int, int], ParamKey]:
        tracks = self.data.tracks.items()
        return {(rank, track.param.id): key for key, of_rank in tracks for rank, track in of_rank.items()}

    def events_of(self, kind: type[Kind]) -> Iterator[tuple[int, Kind]]:
        """The step's events of a kind, by rank."""
        for rank, of_rank in sorted(self.data.events.items()):
            for event in of_rank:
                if isinstance(event, kind):
                    yield rank, event

    def params_in(self, rank: int, param_set: int | None) -> frozenset[ParamKey]:
        """The parameters of a set that a rank recorded, as far as they were followed in this step."""
        ids = self.data.params_of(rank, param_set)
        return frozenset(self._keys[rank, param] for param in ids if (rank, param) in self._keys)

    def trained_on(self, ranks: Collection[int]) -> frozenset[ParamKey]:
        """The parameters that got a gradient on some of these ranks."""
        return frozenset(
            key
            for key, of_rank in self.data.tracks.items()
            if any(track.leaves for rank, track in of_rank.items() if rank in ranks)
        )

    @property
    def weights_right(self) -> bool:
        """Whether every weight that could be told is as it should be."""
        is_off = self.found or self.waiting or self.made_up
        return not is_off and any(held.cells for held in self.held)

    @property
    def wholly_right(self) -> bool:
        """Whether they are, and no coefficient was taken for meant."""
        return self.weights_right and not self.as_measured


@dataclass(frozen=True)
class Remark:
    """What a rule found in a step: its words, a factor where there is one, whom it concerns, and the culprit event.
    `explains` tells which findings of the weights are consequences of it, and no causes of their own; so are those of
    the `rescales` codes that concern none but its parameters."""

    answer: Answer
    pattern: str
    params: frozenset[ParamKey]
    ranks: tuple[int, ...]
    rank: int
    event: Event | None
    factor: Factor = field(default_factory=lambda: Factor(observed=None))
    effect: Effect | None = None
    explains: Callable[[Finding], bool] = lambda finding: False
    rescales: frozenset[str] = frozenset()
