"""A run folder that may still grow: reads every rank on and tells how each is doing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradcheck_dist.events import Clip, Loss
from gradcheck_dist.trace.run import Run, note_problems, read_manifest, trace_files
from gradcheck_dist.tui.columns import ColumnWatch
from gradcheck_dist.tui.rank_file import (
    BACKWARD,
    CLIP,
    LOSS,
    LOSS_GRADIENT,
    OPTIMIZER_STEP,
    STEP_END,
    RankFile,
    TakeColumns,
)
from gradcheck_dist.tui.snapshot import RankLine, RankState, Series

SILENT_S = 10.0
"""A rank that has not ended and wrote nothing for so long, is taken for dead. Its next byte revives it."""

SCAN_S, SCAN_DUTY = 0.5, 50.0
"""How often the folder is searched for new ranks, and how much longer than a search that is at least."""

BUDGET_S = 0.1
"""One poll reads no longer than this; what is left is read by the next ones."""

FIRST_BYTES = 1 << 15
"""Of each rank so much is read before any is read on: who is there and what the first step was."""

LOOKS = 256
"""Files that one poll looks at for something new."""

ENDED_TURNS = 16
"""Files of ranks that have ended are looked at every so many polls."""


class LiveRun:
    """Reads a folder as it grows. `poll` is cheap when nothing was written: one stat a rank."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._ranks: dict[int, RankFile] = {}
        self._scan_s = float("-inf")
        self._next = 0
        self._turn = 0
        self._loss: dict[str, dict[int, tuple[float, float]]] = {}
        self._grad_norm: dict[int, float] = {}
        self._norm_of: dict[int, int] = {}
        self._clipped: dict[int, float] = {}
        self._steps: set[int] = set()
        self._lost: set[int] = set()
        self._stepped: set[int] = set()
        self._ended: dict[int, set[int]] = {}
        self._lines: dict[int, tuple[tuple[object, ...], RankLine]] = {}
        self._counts, self._share = (0, 0), 1.0
        self.columns = ColumnWatch()

    def poll(self) -> bool:
        """Read what was written since the last call, as far as time allows; True when there was anything."""
        now = self._clock()
        changed = False
        if now >= self._scan_s:
            started = time.monotonic()
            for rank, file in trace_files(self.path).items():
                if rank not in self._ranks or self._ranks[rank].path != file:
                    self._ranks[rank] = RankFile(file)
                    changed = True
            # A folder of a thousand files takes a while to list.
            self._scan_s = now + max(SCAN_S, SCAN_DUTY * (time.monotonic() - started))
        fresh = [one.look() for one in self._due()]
        read = self._read()
        self._count()
        self._settle()
        return read or changed or any(fresh)

    def _count(self) -> None:
        """What is asked for many times between two polls."""
        files = list(self._ranks.values())
        num_bytes = sum(max(one.size, 0) for one in files)
        self._counts = sum(one.num_events for one in files), num_bytes
        self._share = 1.0 - sum(one.waiting for one in files) / max(1, num_bytes)

    def _settle(self) -> None:
        """Compare the steps in columns of which every rank has told."""
        if not self.columns.steps:
            return
        size = max((one.trace.header.world_size for one in self._ranks.values() if one.trace is not None), default=0)
        ended = not self.live and self.share_read == 1.0
        self.columns.settle(self._ranks, known=len(self._ranks) >= size, ended=ended)

    def _due(self) -> list[RankFile]:
        """Files to look at now. Of a thousand idle ones each is looked at every few polls."""
        files = list(self._ranks.values())
        new = [one for one in files if one.size < 0]
        due = [one for one in files if one.size >= 0 and not one.ended]
        ended = [one for one in files if one.size >= 0 and one.ended]
        self._turn += 1
        parts = max(1, -(-len(due) // LOOKS))
        return [*new, *due[self._turn % parts :: parts], *ended[self._turn % ENDED_TURNS :: ENDED_TURNS]]

    def _read(self) -> bool:
        """A piece of each rank in turn: all ranks come forward together."""
        self._heads()
        deadline = time.monotonic() + BUDGET_S
        turn = [rank for rank, one in self._ranks.items() if one.waiting]
        turn = [rank for rank in turn if rank >= self._next] + [rank for rank in turn if rank < self._next]
        read = bool(turn)
        while turn:
            again = []
            for rank in turn:
                if self._ranks[rank].scan(self._taker(rank), columns=self._column_taker(rank)):
                    again.append(rank)
                if time.monotonic() > deadline:  # a piece at least is read, however slow the machine
                    self._next = rank + 1
                    return True
            turn = again
        return read

    def _heads(self) -> None:
        """The beginning of every file that was not opened yet, however long that takes: 33 MB of 1024 ranks."""
        for rank, one in self._ranks.items():
            if one.waiting and not one.begun:
                one.scan(self._taker(rank), FIRST_BYTES, self._column_taker(rank))

    def _taker(self, rank: int) -> Callable[[Any], None]:
        ended, steps, loss, grad_norm, clipped = self._ended, self._steps, self._loss, self._grad_norm, self._clipped
        lost, stepped, norm_of = self._lost, self._stepped, self._norm_of

        def take(event: Any) -> None:
            kind = type(event)
            if kind is STEP_END:
                ended.setdefault(event.step, set()).add(rank)
            elif kind is BACKWARD:
                steps.add(event.step)
            elif kind is LOSS_GRADIENT:
                lost.add(event.step)
            elif kind is OPTIMIZER_STEP:
                stepped.add(event.step)
            elif kind is LOSS or kind is Loss:
                if event.value is not None and event.num_tokens and event.requires_grad:
                    of_term = loss.setdefault(event.term, {})
                    total, tokens = of_term.get(event.step, (0.0, 0.0))
                    value = event.value * (event.num_tokens if event.reduction == "mean" else 1)
                    of_term[event.step] = (total + value, tokens + event.num_tokens)
            elif (kind is CLIP or kind is Clip) and not event.partial and rank <= norm_of.get(event.step, rank):
                norm_of[event.step] = rank  # the first rank's norm, as in reports: it is the one that trainers log
                grad_norm[event.step] = event.total_norm
                clipped.pop(event.step, None)
                if event.coefficient < 1.0:
                    clipped[event.step] = event.total_norm * event.coefficient

        return take

    def _column_taker(self, rank: int) -> TakeColumns:
        return lambda trace, columns: self.columns.take(rank, trace, columns)

    @property
    def ranks(self) -> list[int]:
        """Those with a file that holds a header."""
        return sorted(rank for rank, one in self._ranks.items() if one.trace is not None)

    def in_columns(self, step: int) -> bool:
        """Whether nothing but numbers was recorded of a step: no samples."""
        return step in self.columns.steps and step not in self._steps

    @property
    def num_files(self) -> int:
        return len(self._ranks)

    @property
    def share_read(self) -> float:
        """1.0 when every byte was seen; a frame that is still being written does not count as unread."""
        return self._share

    @property
    def live(self) -> bool:
        """Whether some rank may still write."""
        now = self._clock()
        return any(not one.ended and now - one.written_s < SILENT_S for one in self._ranks.values())

    def run(self, steps: Collection[int], ranks: Collection[int] | None = None) -> Run:
        """What was read of these steps, as a diagnosis wants it. Steps in columns are made events of again, of these
        `ranks` only. May be called from another thread than `poll`."""
        run = Run(self.path, read_manifest(self.path))
        settled = not self.live
        unreadable: dict[int, str] = {}
        ends: list[str] = []
        for rank, one in sorted(self._ranks.items()):
            trace = one.load(steps, expanded=ranks is None or rank in ranks)
            if trace is None:
                unreadable[rank] = one.problem or f"{one.path.name}: no header was written"
                continue
            run.ranks[rank] = trace
            if one.problem:
                ends.append(one.problem)
            elif settled and one.cut:
                ends.append(f"{one.path.name}: {one.cut}")
        if run.ranks:
            note_problems(run, unreadable)
        else:
            run.problems = list(unreadable.values())
        run.problems += ends
        return run

    def whole_steps(self) -> list[int]:
        """Steps that every rank seen so far has recorded to their end; once all is read of a run that nobody writes
        any more, all steps."""
        return self._whole(self._steps)

    def blind_steps(self) -> list[int]:
        """Of the steps recorded to their end, those that are to be told as ledger.tracks.blind_steps does."""
        return self._whole((self._lost & self._stepped) - self._steps)

    def _whole(self, steps: Collection[int]) -> list[int]:
        num = self._num_begun
        if not num:
            return []
        if not self.live and self.share_read == 1.0:
            return sorted(steps)
        return sorted(step for step in steps if len(self._ended.get(step, ())) >= num)

    @property
    def _num_begun(self) -> int:
        return sum(one.trace is not None or one.waiting > 0 for one in self._ranks.values())

    def last_ended(self, steps: Sequence[int]) -> int:
        """The last of these ascending steps that every rank recorded to its end; the very last where none is."""
        num, until = self._num_begun, self.columns.whole_until
        for step in reversed(steps):
            if self.in_columns(step):
                if until is not None and step <= until:
                    return step
            elif len(self._ended.get(step, ())) >= num:
                return step
        return steps[-1]

    def column_steps(self) -> list[int]:
        """Steps in columns that were compared over all ranks."""
        until = self.columns.whole_until
        return sorted(step for step in self.columns.steps if step <= until) if until is not None else []

    @property
    def last_step(self) -> int | None:
        """The newest step of any rank, also when only the end of its file was looked at."""
        return max((one.last_step for one in self._ranks.values() if one.last_step is not None), default=None)

    def lines(self) -> tuple[RankLine, ...]:
        """The state of every rank, also of those that a header or the manifest promises."""
        traces = [one.trace for one in self._ranks.values() if one.trace is not None]
        size = max((trace.header.world_size for trace in traces), default=0)
        ranks = sorted({*range(min(size, 1 << 16)), *self._ranks})
        now = self._clock()
        return tuple(self._known_line(rank, now) for rank in ranks)

    def _known_line(self, rank: int, now: float) -> RankLine:
        """Of a thousand ranks few have changed since the last look."""
        one = self._ranks.get(rank)
        if one is None:
            return RankLine(rank, "missing", "its trace file is missing")
        silent = now - one.written_s
        damage = len(one.trace.damage) if one.trace is not None else -1
        # A duration in words changes with its leading digits: often when it is short.
        age = int(silent) if silent < 120 else 120 + int(silent / 60)
        cut = one.behind if one.at_end else 0
        key = (one, one.num_events, one.size, one.last_step, one.problem, damage, cut, -1 if one.ended else age)
        known = self._lines.get(rank)
        if known is None or known[0] != key:
            known = self._lines[rank] = key, self._line(rank, one, silent)
        return known[1]

    def _line(self, rank: int, one: RankFile, silent: float) -> RankLine:
        trace = one.trace
        if trace is None:
            state: RankState = "unreadable" if one.problem else "waiting"
            return RankLine(rank, state, one.problem or "no header yet", num_bytes=max(one.size, 0))
        detail, state = "", "ended" if one.ended else "running"
        if trace.damage:
            detail = f"damaged: {trace.damage[0]}"
        if not one.ended and silent >= SILENT_S:
            state = "dead"
            detail = f"no end was recorded, silent for {_duration(silent)}" + (f", {one.cut}" if one.cut else "")
        return RankLine(rank, state, detail or one.problem, one.last_step, one.num_events, max(one.size, 0))

    def series(self, recorded: Mapping[int, float]) -> Series:
        """The charts. `recorded` norms were measured by the probes, and stand where clipping saw none."""
        of_term = self._loss.get("main") or next(iter(self._loss.values()), {})
        losses = dict(self.columns.series("loss"))
        losses |= {step: total / tokens for step, (total, tokens) in of_term.items() if tokens}
        norms = dict(recorded) | dict(self.columns.series("grad_norm")) | self._grad_norm
        clipped = self._clipped.get(max(norms)) if norms else None
        return Series(tuple(sorted(losses.items())), tuple(sorted(norms.items())), clipped)

    def counts(self) -> tuple[int, int]:
        """(events read, bytes there)."""
        return self._counts


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
