"""What each rank did when in a step: its events as marks on lanes, one lane a rank or pipeline stage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, replace

from gradcheck_dist.events import Event, Loss
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.reports.timeline import KINDS, duration_ns, kind_of

_LETTERS = {
    "loss": "F",
    "loss_gradient": "L",
    "backward": "B",
    "reduce": "R",
    "scale_grads": "S",
    "grad_write": "W",
    "amp_unscale": "U",
    "clip": "C",
    "clip_value": "V",
    "gradient_norm": "N",
    "optimizer_step": "O",
    "zero_grad": "Z",
    "pipeline_step": "P",
}
LETTERS: dict[type[Event], str] = {KINDS[kind]: letter for kind, letter in _LETTERS.items()}
"""Event kinds that have a place on the timeline, with their letters."""
OTHER = "!"
"""The letter of any other event that a finding points at."""


def name_of(event: Event) -> str:
    """The kind of an event in words. A loss ends a forward, which is not recorded itself."""
    return "forward" if isinstance(event, Loss) else kind_of(event).replace("_", " ")


@dataclass(frozen=True)
class Mark:
    """An event on a lane. Times are ns since the step's first event; `reads` are the ids of its parameters."""

    rank: int
    seq: int
    letter: str
    name: str
    start_ns: int
    end_ns: int
    stage: int | None
    accumulation_step: int | None
    microbatch: int | None
    sync: bool | None
    event: Event
    params: frozenset[int] | None


@dataclass(frozen=True)
class Lane:
    """What one rank did for one pipeline stage (None without), in time order."""

    rank: int
    stage: int | None
    marks: tuple[Mark, ...]

    @property
    def label(self) -> str:
        return f"rank {self.rank}" + (f" stage {self.stage}" if self.stage is not None else "")


def lanes_of(data: StepData, start_ns: int, culprits: Collection[tuple[int, int]] = ()) -> tuple[Lane, ...]:
    """The lanes of a step that began at `start_ns`, by rank and stage. `culprits`: rank and seq of events that have a
    place there whatever they are."""
    lanes: list[Lane] = []
    for rank, events in sorted(data.events.items()):
        shown = [event for event in events if type(event) in LETTERS or (rank, event.seq) in culprits]
        marks = [_mark(data, rank, event, start_ns) for event in shown]
        marks = sorted(_with_forward(marks), key=lambda mark: (mark.start_ns, mark.seq))
        stages = sorted({mark.stage for mark in marks if mark.stage is not None})
        if len(stages) < 2:
            lanes.append(Lane(rank, stages[0] if stages else None, tuple(marks)))
            continue
        for stage in stages:
            own = {stage, None} if stage == stages[0] else {stage}  # what has no stage stands on the first one's lane
            lanes.append(Lane(rank, stage, tuple(mark for mark in marks if mark.stage in own)))
    return tuple(lanes)


def _mark(data: StepData, rank: int, event: Event, start_ns: int) -> Mark:
    end = event.t_ns - start_ns
    which = getattr(event, "params", None)
    return Mark(
        rank=rank,
        seq=event.seq,
        letter=LETTERS.get(type(event), OTHER),
        name=name_of(event),
        start_ns=end - duration_ns(event),
        end_ns=end,
        stage=getattr(event, "stage", None),
        accumulation_step=getattr(event, "accumulation_step", None),
        microbatch=getattr(event, "microbatch", None),
        sync=getattr(event, "sync", None),
        event=event,
        params=None if which is None else frozenset(data.params_of(rank, which)),
    )


def _with_forward(marks: list[Mark]) -> list[Mark]:
    """Forward has no event of its own: it is taken to last from whatever ended before it to its loss."""
    ends = sorted(mark.end_ns for mark in marks)
    result = []
    for mark in marks:
        if mark.letter == "F":
            before = bisect_left(ends, mark.end_ns)
            mark = replace(mark, start_ns=ends[before - 1] if before else mark.end_ns)
        result.append(mark)
    return result
