"""A run folder that may still grow: tails every rank and tells how each is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import Backward, Clip, Loss, RunEnd, StepEnd
from gradcheck_dist.trace.reader import TraceTail
from gradcheck_dist.trace.run import Run, read_manifest, trace_files
from gradcheck_dist.tui.snapshot import RankLine, RankState, Series

SILENT_S = 10.0
"""A rank that has not ended and wrote nothing for so long, is taken for dead. Its next byte revives it."""

SCAN_S = 0.5
"""How often the folder is searched for new ranks."""


@dataclass
class _Rank:
    """One rank's tail and what was counted of it so far."""

    tail: TraceTail
    size: int = -1
    written_s: float = 0.0
    seen: int = 0
    last_step: int | None = None
    ended: bool = False
    steps: set[int] = field(default_factory=set)
    whole_steps: set[int] = field(default_factory=set)
    problem: str = ""


class LiveRun:
    """Reads a folder as it grows. `poll` is cheap when nothing was written: one stat a rank."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._ranks: dict[int, _Rank] = {}
        self._scanned_s = float("-inf")
        self._loss: dict[int, tuple[float, float]] = {}
        self._grad_norm: dict[int, float] = {}

    def poll(self) -> bool:
        """Read what was written since the last call; True when there was anything."""
        now = self._clock()
        if now - self._scanned_s >= SCAN_S:
            self._scanned_s = now
            for rank, file in trace_files(self.path).items():
                if rank not in self._ranks or self._ranks[rank].tail.path != file:
                    self._ranks[rank] = _Rank(TraceTail(file))
        changed = [self._poll_rank(one) for one in self._ranks.values()]
        return any(changed)

    def _poll_rank(self, one: _Rank) -> bool:
        try:
            status = one.tail.path.stat()
            if status.st_size == one.size or one.problem:
                return False
            one.size, one.written_s = status.st_size, status.st_mtime
            one.tail.poll()
        except (GradcheckError, OSError) as error:
            one.problem = str(error)
            return True
        trace = one.tail.trace
        for event in trace.events[one.seen :] if trace is not None else ():
            one.last_step = max(event.step, one.last_step or 0)
            if isinstance(event, StepEnd):
                one.whole_steps.add(event.step)
            elif isinstance(event, Backward):
                one.steps.add(event.step)
            elif isinstance(event, RunEnd):
                one.ended = True
            elif isinstance(event, Loss) and event.value is not None and event.num_tokens and event.requires_grad:
                total, tokens = self._loss.get(event.step, (0.0, 0.0))
                value = event.value * (event.num_tokens if event.reduction == "mean" else 1)
                self._loss[event.step] = (total + value, tokens + event.num_tokens)
            elif isinstance(event, Clip) and not event.partial:
                self._grad_norm[event.step] = event.total_norm
        one.seen = len(trace.events) if trace is not None else 0
        return True

    @property
    def num_files(self) -> int:
        return len(self._ranks)

    @property
    def live(self) -> bool:
        """Whether some rank may still write."""
        now = self._clock()
        return any(not one.ended and now - one.written_s < SILENT_S for one in self._ranks.values())

    def run(self) -> Run:
        """What was read so far, as a diagnosis wants it."""
        run = Run(self.path, read_manifest(self.path))
        settled = not self.live
        for rank, one in sorted(self._ranks.items()):
            trace = one.tail.trace
            if trace is None:
                run.problems.append(one.problem or f"rank {rank}: no header was written")
                continue
            run.ranks[rank] = trace
            run.problems += [f"{one.tail.path.name}: {damage}" for damage in trace.damage]
            if one.problem:
                run.problems.append(one.problem)
            elif settled and one.size > trace.num_bytes:
                run.problems.append(f"{one.tail.path.name}: {self._cut(one)}")
        run.problems += [f"rank {rank}: its trace file is missing" for rank in run.missing_ranks]
        return run

    def whole_steps(self) -> list[int]:
        """Steps that every rank seen so far has recorded to their end; once nobody writes any more, all steps."""
        traced = [one for one in self._ranks.values() if one.tail.trace is not None]
        if not traced:
            return []
        if not self.live:
            return sorted(set().union(*(one.steps for one in traced)))
        steps = set().union(*(one.steps for one in traced))
        return sorted(set.intersection(steps, *(one.whole_steps for one in traced)))

    def lines(self) -> tuple[RankLine, ...]:
        """The state of every rank, also of those that a header or the manifest promises."""
        traces = [one.tail.trace for one in self._ranks.values() if one.tail.trace is not None]
        size = max((trace.header.world_size for trace in traces), default=0)
        ranks = sorted({*range(min(size, 1 << 16)), *self._ranks})
        return tuple(self._line(rank) for rank in ranks)

    def _line(self, rank: int) -> RankLine:
        one = self._ranks.get(rank)
        if one is None:
            return RankLine(rank, "missing", "its trace file is missing")
        trace = one.tail.trace
        if trace is None:
            state: RankState = "unreadable" if one.problem else "waiting"
            return RankLine(rank, state, one.problem or "no header yet", num_bytes=max(one.size, 0))
        silent = self._clock() - one.written_s
        detail, state = "", "ended" if one.ended else "running"
        if trace.damage:
            detail = f"damaged: {trace.damage[0]}"
        if not one.ended and silent >= SILENT_S:
            state = "dead"
            cut = f", {self._cut(one)}" if one.size > trace.num_bytes else ""
            detail = f"no end was recorded, silent for {_duration(silent)}{cut}"
        return RankLine(rank, state, detail or one.problem, one.last_step, len(trace.events), max(one.size, 0))

    @staticmethod
    def _cut(one: _Rank) -> str:
        read = one.tail.trace.num_bytes if one.tail.trace is not None else 0
        return f"cut inside a frame, its last {one.size - read} bytes cannot be read"

    def series(self) -> Series:
        loss = tuple((step, total / tokens) for step, (total, tokens) in sorted(self._loss.items()) if tokens)
        return Series(loss, tuple(sorted(self._grad_norm.items())))

    def counts(self) -> tuple[int, int]:
        """(events, bytes) read."""
        return sum(one.seen for one in self._ranks.values()), sum(max(one.size, 0) for one in self._ranks.values())


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
