"""A rank's columns, block by block, as a few numbers a step: what the comparison over ranks needs, and no more.

Of each step: its tokens, and the least and the largest of q = (weight at the loss) x (documented factor), normalised so
that the objective asks for one value of q in all of a step's contributions:

    global-token-mean   q = w          must be 1 / N
    microbatch-mean     q = w n_c      must be 1 / C
    rank-token-mean     q = w N_d      must be 1 / D
    sum                 q = w          must be 1

with n_c tokens in a contribution, N_d on a data coordinate, N in the step, C contributions and D data coordinates that
have any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from gradcheck_dist.diagnosis.losses.parts import LEAST
from gradcheck_dist.diagnosis.weights.cells import MAX_SPREAD
from gradcheck_dist.events import (
    AnyRecord,
    Event,
    ParamSet,
    ProbeStatus,
    RunEnd,
    Samples,
    StepColumns,
    StepShape,
    Unrecorded,
)
from gradcheck_dist.stream.documented import ShapeWays, ways_of
from gradcheck_dist.trace.frames import Damage
from gradcheck_dist.trace.reader import RankTrace, TraceTail
from gradcheck_dist.trace.store import Place

READ_BYTES = 1 << 20
MAX_STEP = 1 << 48
"""No training counts this far: a larger step is damage."""


@dataclass
class Block:
    """Consecutive steps of one shape on one rank. Arrays have shape (num_steps,)."""

    shape: ShapeWays
    columns: StepColumns
    num_bytes: int = 0

    @property
    def first_step(self) -> int:
        return self.columns.first_step

    @property
    def num_steps(self) -> int:
        return self.columns.num_steps

    def rows(self, rows: list[int], dtype: str) -> np.ndarray:
        """Rows of the numbers, shape (len(rows), num_steps); a view where the rows lie together."""
        numbers: np.ndarray = np.frombuffer(self.columns.numbers, dtype=dtype).reshape(-1, self.num_steps)
        together = rows and rows == list(range(rows[0], rows[-1] + 1))
        found: np.ndarray = numbers[rows[0] : rows[-1] + 1] if together else np.take(numbers, rows, axis=0)
        return found

    def tokens(self) -> np.ndarray:
        """Valid tokens at each loss, shape (num_losses, num_steps)."""
        return self.rows(self.shape.token_rows, "<i8")

    def weights(self) -> np.ndarray:
        """Weight of a token at each loss, freed of the loss scale, shape (num_losses, num_steps)."""
        weights = self.rows(self.shape.weight_rows, "<f8")
        unscaled = {way.num_unscaled for way in self.shape.ways}
        if unscaled == {1} and self.shape.scale_rows:
            weights = weights / self.rows(self.shape.scale_rows[:1], "<f8")
        return np.abs(weights) if self.shape.of_elements else weights  # of a gain the sign is the program's

    def normalised(self, objective: str) -> np.ndarray:
        """q without the documented factor, shape (num_losses, num_steps); NaN where there are no tokens."""
        weights, tokens = self.weights(), self.tokens()
        if objective == "microbatch-mean":
            weights = weights * self.of_slots(tokens)[self.shape.slot_of]
        elif objective == "rank-token-mean":
            weights = weights * tokens.sum(axis=0)
        return weights if tokens.all() else np.where(tokens > 0, np.nan_to_num(weights, nan=np.inf), np.nan)

    def of_slots(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens of each slot, shape (num_slots, num_steps): all losses of a pass are one contribution."""
        found = np.zeros((len(self.shape.slots), self.num_steps))
        np.add.at(found, self.shape.slot_of, tokens)
        return found

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        """The sum of all tokens' losses; NaN where some are not known. Shape (num_steps,)."""
        rows = self.shape.loss_rows
        if not rows:
            return np.full(self.num_steps, np.nan)
        values = self.rows(rows, "<f8")
        if not self.shape.any_mean:
            return np.asarray(values.sum(axis=0))
        if self.shape.all_mean and tokens.all():
            return np.asarray((values * tokens).sum(axis=0))
        # A mean over no tokens is NaN, and adds nothing.
        times = np.where(np.array(self.shape.is_mean)[:, None], tokens, 1)
        return np.asarray(np.where(times > 0, values * times, 0.0).sum(axis=0))

    def norms(self) -> np.ndarray:
        """The gradient norm that was clipped last; NaN where none was. Shape (num_steps,)."""
        if not self.shape.norm_rows:
            return np.full(self.num_steps, np.nan)
        # A copy: a view would keep the whole block in memory until all ranks have told of the round.
        last: np.ndarray = self.rows(self.shape.norm_rows[-1:], "<f8")[0].copy()
        return last

    def hashes(self) -> np.ndarray:
        """One checksum of a step's labels, in the order of losses; 0 where some are not known. Shape (num_steps,)."""
        rows = [row for row in self.shape.hash_rows if row is not None]
        if not rows or len(rows) < len(self.shape.hash_rows):
            return np.zeros(self.num_steps, dtype=np.int64)
        odd = 2 * np.arange(len(rows), dtype=np.int64)[:, None] + 1
        with np.errstate(over="ignore"):
            checksum: np.ndarray = (self.rows(rows, "<i8") * odd).sum(axis=0)
        return checksum

    def is_mixed(self) -> np.ndarray:
        """Steps in which tokens of one loss have unequal weights, shape (num_steps,)."""
        mixed = np.zeros(self.num_steps, dtype=bool)
        for low, high in self.shape.spread_rows:
            least, largest = self.rows([low, high], "<f8")
            mixed |= ~(np.abs(largest - least) <= MAX_SPREAD * np.abs(largest))
        mixed |= self._in_parts()
        return mixed

    def _in_parts(self) -> np.ndarray:
        """Steps in which a later pass has the labels and the loss of the first: parts of one loss, or one batch that
        was evaluated again. Shape (num_steps,)."""
        first, *later = self.shape.rows_of_slots
        found = np.zeros(self.num_steps, dtype=bool)
        for of_slot in later:
            values, others = (self.rows([value for _, value in of], "<f8") for of in (first, of_slot))
            hashes, other_hashes = (self.rows([of_labels for of_labels, _ in of], "<i8") for of in (first, of_slot))
            close = np.abs(values - others) < LEAST * np.abs(values)  # and not 0, which empty passes have
            found |= (close & (hashes == other_hashes)).all(axis=0)
        return found


KnownShapes = dict[tuple[bytes, tuple[tuple[int, tuple[int, ...]], ...]], ShapeWays]
"""By a shape's events and the parameter sets that they refer to."""


class Blocks:
    """Makes blocks of one rank's columns. `known` may be shared: of 1024 ranks, most wrote the same shapes."""

    def __init__(self, known: KnownShapes) -> None:
        self._known = known
        self._ways: dict[int, ShapeWays] = {}

    def block(self, trace: RankTrace, columns: StepColumns) -> Block:
        """The block of one record.

        Raises:
            ValueError: its shape is missing or none, or its numbers do not fit it.
        """
        ways = self._ways_of(trace, columns.shape)
        count, size = columns.num_steps, 8 * columns.num_steps * ways.num_rows
        if count < 1 or not 0 <= columns.first_step < MAX_STEP or len(columns.first_seqs) != 8 * count:
            raise ValueError(
                f"{count} steps from step {columns.first_step} with {len(columns.first_seqs)} bytes of seq"
            )
        if len(columns.numbers) != size:
            raise ValueError(f"{len(columns.numbers)} bytes of numbers for {count} steps, not {size}")
        return Block(ways, columns)

    def _ways_of(self, trace: RankTrace, id: int) -> ShapeWays:
        if id not in self._ways:
            if id not in trace.shapes:
                raise ValueError(f"step shape {id} is missing")
            shape = trace.shapes[id]
            key = (shape.events, tuple(sorted(trace.param_sets.items())))
            if key not in self._known:
                try:
                    self._known[key] = ways_of(shape, trace.param_sets)
                except (msgspec.MsgspecError, UnicodeDecodeError, ArithmeticError) as error:
                    raise ValueError(f"step shape {id} is none: {error}") from error
            self._ways[id] = self._known[key]
        return self._ways[id]


class BlockReader(TraceTail):
    """Reads a rank's blocks in order, checksums verified, with one chunk of the file in memory.

    `has_more`: there are steps in the file that are not in columns.
    """

    def __init__(self, path: Place, known: KnownShapes | None = None) -> None:
        super().__init__(path)
        self._blocks: list[Block] = []
        self._maker = Blocks({} if known is None else known)
        self.has_more = False

    def _receive(self, trace: RankTrace, records: list[AnyRecord]) -> None:
        for record in records:
            if isinstance(record, StepColumns):
                self._take_columns(trace, record)
            elif isinstance(record, ParamSet | StepShape):
                trace.add([record])
            elif isinstance(record, Samples | Event) and not isinstance(record, ProbeStatus | RunEnd | Unrecorded):
                self._take_other(trace, record)

    def _take_columns(self, trace: RankTrace, columns: StepColumns) -> None:
        try:
            self._blocks.append(self._maker.block(trace, columns))
        except ValueError as error:
            words = f"steps in columns cannot be read: {error}"
            self._note_damage(Damage(self.offset, len(columns.numbers), words))
        else:
            trace.shapes.pop(columns.shape, None)  # of 1024 ranks, most wrote the same

    def _take_other(self, trace: RankTrace, record: Samples | Event) -> None:
        self.has_more = True

    def chunks(self, read_bytes: int = READ_BYTES) -> Iterator[list[Block]]:
        """The blocks of one piece of the file after the other."""
        while not self.at_end:
            self.poll(final=True, limit=read_bytes)
            yield self._handed_out()

    def _handed_out(self) -> list[Block]:
        # Not a variable of chunks(): there every rank's last chunk would stay in memory.
        blocks, self._blocks = self._blocks, []
        return blocks


MakeReader = Callable[[Place, KnownShapes], BlockReader]


@dataclass
class Summary:
    """Some steps of one rank, ready for the comparison. Arrays have shape (num_steps,)."""

    rank: int
    first_step: int
    way: int
    num_tokens: np.ndarray
    num_contributions: np.ndarray
    low: np.ndarray
    high: np.ndarray
    hashes: np.ndarray
    loss: np.ndarray
    norm: np.ndarray
    mixed: np.ndarray | None


@dataclass
class Round:
    """What a share of the ranks said in one round. `shapes` are those not sent before, by `Summary.way`; `ended` has
    the ranks read to their end, each with what of its file could not be read."""

    summaries: list[Summary]
    shapes: dict[int, ShapeWays]
    ended: dict[int, list[str]]
    num_bytes: int
    has_more: bool = False


class Numbers:
    """Gives shapes that do the same, on whichever rank, one number."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self._number_of: dict[int, tuple[int, ShapeWays]] = {}

    def number(self, shape: ShapeWays, new: dict[int, ShapeWays]) -> int:
        """The number of a shape; in `new` is put what had none before."""
        found = self._number_of.get(id(shape))
        if found is None:
            key = _identity(shape)
            if key not in self._known:
                self._known[key] = len(self._known)
                new[self._known[key]] = shape
            found = self._number_of[id(shape)] = (self._known[key], shape)
        return found[0]


def rounds(
    files: dict[int, Place],
    objective: str,
    read_bytes: int = READ_BYTES,
    make: MakeReader = BlockReader,
) -> Iterator[Round]:
    """Read a share of the ranks, one chunk of `read_bytes` of each in turn, each with the reader that `make` gives."""
    shapes: KnownShapes = {}
    readers = {rank: make(path, shapes) for rank, path in files.items()}
    open_ones = {rank: reader.chunks(read_bytes) for rank, reader in readers.items()}
    numbers = Numbers()
    while open_ones:
        answer = Round([], {}, {}, 0)
        for rank, chunks in list(open_ones.items()):
            before = readers[rank].offset
            blocks = next(chunks, None)
            answer.num_bytes += readers[rank].offset - before
            if blocks is None:
                trace = readers[rank].trace
                answer.ended[rank] = [str(damage) for damage in trace.damage] if trace is not None else []
                del open_ones[rank]
                continue
            for block in blocks:
                number = numbers.number(block.shape, answer.shapes)
                answer.summaries.append(summarise(rank, number, block, objective))
        answer.has_more = any(reader.has_more for reader in readers.values())
        yield answer


def _identity(shape: ShapeWays) -> tuple[object, ...]:
    return (tuple(shape.slots), tuple(shape.ways), shape.pipeline, tuple(shape.slot_of), tuple(shape.reasons),
            shape.tolerance, shape.optimized, shape.of_elements, bool(shape.weight_rows))  # fmt: skip


def summarise(rank: int, number: int, block: Block, objective: str) -> Summary:
    """What the comparison over ranks needs of a block; `number` stands for its shape."""
    shape, num_steps = block.shape, block.num_steps
    low = high = np.full(num_steps, np.nan)
    loss = np.full(num_steps, np.nan)
    num_tokens = num_contributions = np.zeros(num_steps, dtype=np.int64)
    if shape.weight_rows and shape.ways:
        tokens = block.tokens()
        num_tokens, num_contributions = tokens.sum(axis=0), (block.of_slots(tokens) > 0).sum(axis=0)
        q = block.normalised(objective)
        low, high = _extremes(q, shape, bool(tokens.all()))
        loss = block.losses(tokens)
    return Summary(
        rank, block.first_step, number, num_tokens, num_contributions, low, high, block.hashes(),
        loss, block.norms(),
        block.is_mixed() if shape.spread_rows or len(shape.rows_of_slots) > 1 else None,
    )  # fmt: skip


def _extremes(q: np.ndarray, shape: ShapeWays, whole: bool) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest q over all contributions and ways, shape (num_steps,) each."""
    lows, highs = [], []
    for way in shape.ways:
        factors = np.array(way.factors)[shape.slot_of]
        if whole and (factors == factors[0]).all():
            ends = (q.min(axis=0) * factors[0], q.max(axis=0) * factors[0])
            lows.append(np.minimum(*ends))
            highs.append(np.maximum(*ends))
            continue
        values = q * factors[:, None]
        unknown = np.isnan(values).all(axis=0)
        lows.append(np.where(unknown, np.nan, np.nanmin(np.where(unknown, 0.0, values), axis=0)))
        highs.append(np.where(unknown, np.nan, np.nanmax(np.where(unknown, 0.0, values), axis=0)))
    return np.fmin.reduce(lows), np.fmax.reduce(highs)


def detail(path: Place, step: int, make: Callable[[Place], BlockReader] = BlockReader) -> tuple[Block, int] | None:
    """The block of a rank that holds a step, and the step's column in it."""
    for blocks in make(path).chunks():
        for block in blocks:
            if block.first_step <= step < block.first_step + block.num_steps:
                return block, step - block.first_step
    return None
