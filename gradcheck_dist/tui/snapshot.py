"""What the screens show at one moment: made whole in the worker thread, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report
    from gradcheck_dist.reports.document import Document
    from gradcheck_dist.tui.grid import WeightGrid
    from gradcheck_dist.tui.step_view import StepView

Phase = Literal["reading", "waiting", "recording", "ready", "error"]
"""reading: first look; waiting: no trace yet; recording: no whole step yet; ready: judged; error: cannot be shown."""

RankState = Literal["waiting", "running", "ended", "dead", "missing", "unreadable"]


@dataclass(frozen=True)
class RankLine:
    """How one rank is doing. `detail` says in words why it is not well."""

    rank: int
    state: RankState
    detail: str = ""
    last_step: int | None = None
    num_events: int = 0
    num_bytes: int = 0

    @property
    def well(self) -> bool:
        return self.state in ("running", "ended") and not self.detail


@dataclass(frozen=True)
class Series:
    """Numbers by step, as far as they are known. `clipped`: what the norm of the last step was scaled down to."""

    loss: tuple[tuple[int, float], ...] = ()
    grad_norm: tuple[tuple[int, float], ...] = ()
    clipped: float | None = None


@dataclass(frozen=True)
class OtherRun:
    """The run on the right side of the comparison, or why there is none."""

    path: str
    title: str = ""
    report: Report | None = None
    document: Document | None = None
    grid: WeightGrid | None = None
    problem: str = ""


@dataclass(frozen=True)
class Snapshot:
    """`recorded` are the steps in the trace, `judged` those that the report covers, `step` the one shown in detail.

    `loading` says in words what is still being read or judged, and is empty when all is there.
    """

    path: str
    phase: Phase = "reading"
    message: str = ""
    loading: str = ""
    live: bool = False
    ranks: tuple[RankLine, ...] = ()
    world_size: int = 0
    last_step: int | None = None
    recorded: tuple[int, ...] = ()
    judged: tuple[int, ...] = ()
    report: Report | None = None
    document: Document | None = None
    step: StepView | None = None
    grid: WeightGrid | None = None
    series: Series = field(default_factory=Series)
    siblings: tuple[str, ...] = ()
    other: OtherRun | None = None
    num_events: int = 0
    num_bytes: int = 0
    has_output: bool = False

    @property
    def title(self) -> str:
        return self.document.title if self.document is not None else self.path


@dataclass(frozen=True)
class Selection:
    """What the user looks at, shared by all screens. `seq` is an event of `rank`; `key` a contribution."""

    finding: int = 0
    param: tuple[int, str] | None = None
    holder: int | None = None
    key: tuple[int, int, int] | None = None
    rank: int | None = None
    seq: int | None = None
