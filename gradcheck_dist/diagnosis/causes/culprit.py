"""The first event after which a contribution's weight could no longer come right."""

from __future__ import annotations

from dataclasses import dataclass

from gradcheck_dist.diagnosis.causes.account import Account, Gap
from gradcheck_dist.diagnosis.causes.places import caller_of, kind_of, line_of
from gradcheck_dist.diagnosis.causes.vocabulary import Rival
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Backward, Event, GradWrite, LossGradient
from gradcheck_dist.ledger.contributions import Contribution
from gradcheck_dist.ledger.tracks import StepData


@dataclass(frozen=True)
class Culprit:
    """Where a weight left the track.

    `kind` is the kind of the event, or "loss" when it was wrong from the start. `absent`: everything was on track to
    the end, but something that should have followed (a reduction) did not; the event is the last backward.
    `unrecorded`: the change lies between `event` (still right) and `before`, done by nothing that was recorded.
    `factor` is the measured factor of the event or gap, `nominal` the documented one. A loss's `event` is its
    evaluation, `gradient` the backward in which its weight was seen. `wrong_constant`: the event did what it documents,
    but should have multiplied by another number. `missing` is the event that other weights went through and this one
    did not. `rivals` are other explanations that cost about as much. `in_flight`: unrecorded, between the
    backward passes of two pipeline stages. `spared`: nothing happened between `event` and `before`, where others were
    multiplied by this number. `hidden`: by what the causes beside a clip that nobody recorded are off further, where
    its lines divide by another number besides than is assumed. `unheard`: between `event` and `before` others were
    given other ranks' contributions by nothing that was recorded, and this one was not; `elsewhere`: these others are
    the same gradient on other ranks. `write`: the trainer's own line between the two that an unrecorded change is laid
    to. `lines`: those that wrote to the gradient there, where it is laid to none.
    """

    kind: str
    rank: int
    event: Event | None
    nominal: float | None = None
    factor: float | None = None
    absent: bool = False
    unrecorded: bool = False
    before: Event | None = None
    gradient: LossGradient | None = None
    wrong_constant: bool = False
    missing: Event | None = None
    rivals: tuple[Rival, ...] = ()
    in_flight: bool = False
    spared: float | None = None
    hidden: tuple[float, ...] = ()
    unheard: bool = False
    elsewhere: bool = False
    write: GradWrite | None = None
    lines: tuple[str, ...] = ()

    def documented(self, tolerance: float) -> bool:
        """Whether the event did what its documentation says."""
        if self.nominal is None or self.factor is None or not self.nominal:
            return True
        return abs(self.factor / self.nominal - 1) <= max(1e-3, 2 * tolerance)

    @property
    def is_open(self) -> bool:
        """Whether an unrecorded change reaches to the end of what was recorded."""
        return self.unrecorded and self.before is None

    @property
    def start(self) -> tuple[object, ...]:
        """The line from which on something happened, and what ran there."""
        site = self.event.site if self.event is not None else None
        return (self.kind, site and (site.file, site.line))

    @property
    def end(self) -> tuple[object, ...] | None:
        """The line up to which something unrecorded happened, and what ran there."""
        before = self.before
        return None if before is None else (type(before).__name__, line_of(before))

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for culprits that are one and the same cause: same kind, operation and source line (`caller_of`)."""
        event = self.event
        return (
            self.kind,
            self.absent,
            self.unrecorded,
            self.in_flight,
            getattr(event, "op", None),
            len(getattr(event, "group", ()) or ()),
            event is not None and caller_of(event),
            self.wrong_constant,
            self.missing and line_of(self.missing),
            *(() if self.before is None else (type(self.before).__name__, caller_of(self.before))),
        )


def blame_loss(contribution: Contribution, factor: float) -> Culprit:
    """The weight was wrong from the start: where the loss was computed and normalised."""
    return Culprit(
        "loss",
        contribution.loss_rank or 0,
        contribution.loss or contribution.gradient,
        factor=factor,
        gradient=contribution.gradient,
    )


def order(culprit: Culprit) -> tuple[int, int, int]:
    """Sorts culprits that are one cause by the time of the event."""
    event = culprit.event
    step = getattr(event, "accumulation_step", 0) or 0
    return (step, culprit.rank, event.seq if event is not None else 0)


def last_backward(data: StepData, held: Held, rank: int) -> Event | None:
    """The last pass in which the parameter's gradient arrived on a rank, or the rank's last where it never did: where a
    reduction should have followed."""
    track = data.tracks[held.param].get(rank)
    if track is None:
        return None
    passes = [event for event in data.events[rank] if isinstance(event, Backward)]
    own = [event for event in passes if track.param.id in data.params_of(rank, event.params)]
    return next(reversed(own or passes), None)


def culprit_of_gap(gap: Gap, accounted: Account) -> Culprit:
    if gap.inside:
        event = gap.end if gap.start is gap.end else gap.start
        assert event is not None
        documented = next((step.factor for step in accounted.steps if step.event is event), 1.0)
        return Culprit(kind_of(event), gap.rank, event, nominal=documented, factor=gap.factor * documented)
    kind = kind_of(gap.start) if gap.start is not None else "loss"
    return Culprit(
        kind,
        gap.rank,
        gap.start,
        nominal=gap.written,
        factor=gap.factor * gap.written,
        unrecorded=True,
        before=gap.end,
        in_flight=gap.in_flight,
    )
