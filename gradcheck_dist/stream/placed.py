"""Steps by the place of their records: who reads a run forwards says which frames hold a step, who judges it reads
these.

Reading is as in cursor.py, with the same bytes at a time, so that a step is whole at the same moment and holds the same
records. What a rank's file told until then (`Told`) travels to whoever puts the ranks together; samples do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradcheck_dist.diagnosis.judged_alone import judge_alone
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import AnyRecord, Event, NamedGroup, Param, ParamSet, ParamValues, Plan, Reduce, Wrapper
from gradcheck_dist.stream.cursor import RankCursor, RunCursor, Seen
from gradcheck_dist.stream.workers import Wanted
from gradcheck_dist.trace.frames import HEAD_BYTES, Damage, payload_in
from gradcheck_dist.trace.reader import RankTrace, decode_records
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import Place, Where, read_ranges

BATCH_STEPS, BATCH_BYTES = 16, 4 << 20
"""One piece of work, or a single step where that is larger."""
MAX_GAP_BYTES = 64 << 10
"""Frames that lie nearer to each other are read in one piece."""
_Tables = Param | ParamSet | ParamValues | Plan | Wrapper | NamedGroup


class Frame(NamedTuple):
    """Where a frame begins, how long its payload is, and which of its records are not sound."""

    offset: int
    num_bytes: int
    unsound: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + HEAD_BYTES + self.num_bytes


@dataclass
class Told:
    """What a rank's file told until its next step was whole, or until its end, where `step` is None."""

    step: int | None
    seen: Seen
    frames: list[Frame]
    tables: list[_Tables]
    events: list[Any]
    damage: list[Damage]
    offset: int
    overflowed: set[int]
    stepped: set[int]


class PlacedRank(RankCursor):
    """A rank's file, read forwards, of which only places are kept."""

    def __init__(self, path: Place, read_bytes: int) -> None:
        super().__init__(path, read_bytes)
        self._frame = Frame(0, 0, ())
        self._at = 0, 0
        self._tables: list[_Tables] = []
        self._told: tuple[set[int], set[int]] = set(), set()

    def _take(self, payload: memoryview, offset: int) -> int:
        self._at = offset, len(payload)
        return super()._take(payload, offset)

    def _receive(self, trace: RankTrace, records: list[AnyRecord]) -> None:
        self._frame = Frame(*self._at, self._checks.unsound)
        self._tables += [record for record in records if isinstance(record, _Tables)]
        super()._receive(trace, records)

    def _keep(self, step: int, record: AnyRecord) -> None:
        frames: list[Any] = self._steps.setdefault(step, [])
        if not frames or frames[-1] is not self._frame:
            frames.append(self._frame)

    def tell(self) -> Told:
        """The next step."""
        trace = self.open()
        step = self.next_step()
        frames: list[Any] = self._steps.get(step, []) if step is not None else []
        overflowed, stepped = self.overflowed - self._told[0], (self.stepped & self.overflowed) - self._told[1]
        told = Told(
            step,
            self.seen(step) if step is not None else Seen(),
            frames,
            self._tables,
            list(trace.events),
            list(trace.damage),
            self.offset,
            overflowed,
            stepped,
        )
        self._told[0].update(overflowed)
        self._told[1].update(stepped)
        self._tables = []
        trace.events.clear()
        trace.damage.clear()
        if step is not None:
            self._forget(step)
        return told


def tell(files: dict[int, Place], read_bytes: int) -> Iterator[dict[int, list[Told]]]:
    """What some ranks' files tell, by rank, about `read_bytes` of each at a time."""
    ranks = {rank: PlacedRank(path, read_bytes) for rank, path in files.items()}
    while ranks:
        answer: dict[int, list[Told]] = {}
        for rank, cursor in list(ranks.items()):
            until = cursor.offset + read_bytes
            told = answer[rank] = [cursor.tell()]
            while told[-1].step is not None and cursor.offset < until:
                told.append(cursor.tell())
            if told[-1].step is None:
                del ranks[rank]
        yield answer


class ToldRank(RankCursor):
    """A rank's file as somebody else reads it: `told` is what has been heard and not been used."""

    def __init__(self, path: Place, read_bytes: int, listen: Callable[[], None]) -> None:
        super().__init__(path, read_bytes)
        self.told: deque[Told] = deque()
        self.num_grounds = 0
        self._listen = listen
        self._head: Told | None = None
        self._heard = False

    def next_step(self) -> int | None:
        if self._head is None:
            while not self.told:
                self._listen()
            self._head = self.told.popleft()
            self._learn(self._head)
        return self._head.step

    def _learn(self, told: Told) -> None:
        trace = self.trace
        assert trace is not None
        if not self._heard:  # what was read beside the header is told again
            for known in trace.tables:
                known.clear()
            trace.events.clear()
            trace.damage.clear()
            self._heard = True
        trace.add([*told.tables, *told.events])
        self.num_grounds += len(told.tables) + sum(isinstance(event, Reduce) for event in told.events)
        self.num_grounds += len(told.damage)
        trace.damage += told.damage
        trace.num_bytes = self._offset = told.offset
        self.overflowed.update(told.overflowed)
        self.stepped.update(told.stepped)

    def seen(self, step: int) -> Seen:
        return self._head.seen if self._head is not None and self._head.step == step else Seen()

    def drop(self, step: int) -> None:
        self.take_frames(step)

    def take_frames(self, step: int) -> list[Frame]:
        """Where this rank's part of a step lies."""
        if self._head is None or self._head.step != step:
            return []
        frames, self._head = self._head.frames, None
        return frames

    def ground(self) -> RankTrace:
        """What the judgement of any step needs of this rank: tables, damage, and one reduction of each kind."""
        trace = self.trace
        assert trace is not None
        reductions: list[Event] = [event for event in trace.events if isinstance(event, Reduce)]
        path = trace.path if not hasattr(trace.path, "absolute") else trace.path.absolute()
        return replace(trace, path=path, events=reductions)


@dataclass
class PlacedStep:
    """Where a step's records lie, by rank."""

    step: int
    frames: dict[int, list[Frame]]

    @property
    def num_bytes(self) -> int:
        return sum(frame.num_bytes for frames in self.frames.values() for frame in frames)


Listening = Generator[dict[int, dict[int, list[Told]]], None, None]
Tell = Callable[[dict[int, Place], int], Listening]
"""Reads ranks by their files, so many bytes of each at a time: like `tell`, by share of the ranks."""


class ToldRun(RunCursor):
    """A run whose ranks are read by somebody else, and whose steps are places."""

    def __init__(self, path: Where, tell: Tell) -> None:
        super().__init__(path)
        self._ranks = {rank: cursor for rank, cursor in self._cursors.items() if isinstance(cursor, ToldRank)}
        self._tell = tell
        self._rounds: Listening | None = None

    def _rank(self, file: Place) -> RankCursor:
        return ToldRank(file, self.read_bytes, self._listen)

    def _listen(self) -> None:
        if self._rounds is None:
            files = {rank: cursor.ground().path for rank, cursor in self._ranks.items()}
            self._rounds = self._tell(files, self.read_bytes)
        for share in next(self._rounds).values():
            for rank, told in share.items():
                self._ranks[rank].told += told

    def close(self) -> None:
        """Nobody reads on."""
        if self._rounds is not None:
            self._rounds.close()

    @property
    def num_grounds(self) -> int:
        """Changes with `ground`."""
        return sum(cursor.num_grounds for cursor in self._ranks.values())

    def ground(self) -> Run:
        """What the judgement of any step needs, as far as it is known: tables, and one reduction of each kind."""
        ranks = {rank: cursor.ground() for rank, cursor in self._ranks.items()}
        return Run(self.run.path, self.run.manifest, ranks, problems=list(self.run.problems))

    def places(self) -> Iterator[PlacedStep]:
        """Where each step with a backward pass lies, ascending."""
        for step in self._following():
            yield PlacedStep(step, {rank: cursor.take_frames(step) for rank, cursor in self._ranks.items()})


def batches(cursor: ToldRun, wanted: Wanted) -> Iterator[tuple[Run, list[PlacedStep]]]:
    """The wanted steps in pieces of work, each with the ground that it is judged on: the one before, unless it has
    changed. The first are small, so that it is soon known how they come out."""
    batch: list[PlacedStep] = []
    ground, known, num_bytes, limit = cursor.ground(), -1, 0, 1
    for placed in cursor.places():
        if not wanted.take(cursor, placed.step):
            continue
        full = len(batch) >= limit or num_bytes + placed.num_bytes > BATCH_BYTES
        if batch and (full or cursor.num_grounds != known):
            yield ground, batch
            batch, num_bytes, limit = [], 0, min(2 * limit, BATCH_STEPS)
        if cursor.num_grounds != known:
            ground, known = cursor.ground(), cursor.num_grounds
        batch.append(placed)
        num_bytes += placed.num_bytes
    if batch:
        yield ground, batch


def judge_batch(ground: Run, steps: list[PlacedStep], objective: str, objective_from: str) -> list[StepVerdict]:
    """The verdicts of some steps.

    Raises:
        GradcheckError: E416 the run has changed since it was first read.
    """
    return [judge_alone(part, step, objective, objective_from) for step, part in parts(ground, steps)]


def parts(ground: Run, steps: Sequence[PlacedStep]) -> Iterator[tuple[int, Run]]:
    """Each step as a run of that step alone, as RunCursor.steps gives it.

    Raises:
        GradcheckError: E416 the run has changed since it was first read.
    """
    wanted: list[tuple[Place, int, int]] = []
    pieces: list[tuple[int, list[Frame]]] = []
    for rank, trace in ground.ranks.items():
        for frames in _pieces(sorted({frame for step in steps for frame in step.frames[rank]})):
            wanted.append((trace.path, frames[0].offset, frames[-1].end))
            pieces.append((rank, frames))
    found: dict[tuple[int, int], list[AnyRecord]] = {}
    for (rank, frames), (place, start, _), data in zip(pieces, wanted, read_ranges(wanted), strict=True):
        for frame in frames:
            payload = payload_in(data, frame.offset - start)
            if payload is None or len(payload) != frame.num_bytes:
                raise GradcheckError(
                    f"{place} has changed at byte {frame.offset} since it was first read. Is the run still being "
                    "written? Judge it again when it has ended.",
                    code="E416",
                )
            records = decode_records(payload)
            found[rank, frame.offset] = [record for i, record in enumerate(records) if i not in frame.unsound]
    for step in steps:
        part = Run(ground.path, ground.manifest, problems=list(ground.problems))
        for rank, trace in ground.ranks.items():
            records = [r for frame in step.frames[rank] for r in found[rank, frame.offset] if _is_of(r, step.step)]
            others: list[Any] = [event for event in trace.events if event.step != step.step]
            part.ranks[rank] = trace.part([*others, *records])
        yield step.step, part


def _is_of(record: AnyRecord, step: int) -> bool:
    return getattr(record, "step", None) == step


def _pieces(frames: list[Frame]) -> Iterator[list[Frame]]:
    """Neighbours together."""
    piece: list[Frame] = []
    for frame in frames:
        if piece and frame.offset - piece[-1].end > MAX_GAP_BYTES:
            yield piece
            piece = []
        piece.append(frame)
    if piece:
        yield piece
