"""The judgement of steps in columns over all ranks: expected against documented weights, as arrays, window by window.

It accuses only where everything that scales is recorded and a product of recorded numbers is not what the objective
asks for. What the records leave open (a reduction that does not join all data ranks, unknown arithmetic, tokens of one
loss with unequal weights) is a reason and no finding: measured samples of a recorded step tell.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import SAFEGUARD
from gradcheck_dist.stream.documented import UNCOUNTED, ShapeWays, Way
from gradcheck_dist.stream.series import Series
from gradcheck_dist.stream.summaries import Round, Summary

START_STEPS = 256
MAX_CELLS, MAX_AHEAD = 1 << 24, 1 << 16
"""Ranks times steps that are kept until all ranks have told of them, and the steps that are in any case."""


EMPTIED = "where passes count nothing, or are emptied before an optimizer reads them, that may be meant"
DIVIDED = "where all weights of a rank are too large by one number, its own lines may divide gradients by it"
SEVERAL = "where losses are computed at several lines, each may be an objective of its own"
NO_LOSS = (
    "no loss was seen on some rank, and no schedule of torch's pipelines: sample some of these steps where it is a "
    "stage of a pipeline by hand (--every N), or call gradcheck_dist.mark_loss where its loss is computed"
)
OF_ELEMENTS = "where losses count no tokens, a coefficient or a mean of unequal numbers may be meant"


@dataclass(frozen=True)
class Deviation:
    """Contributions of some ranks in one step whose documented weights are off; ratios are documented / expected.

    `excuse`: why that may be right all the same, "" where nothing is known that could make it so.
    """

    step: int
    ranks: tuple[int, ...]
    low: float
    high: float
    expected: float
    excuse: str = ""


@dataclass(frozen=True)
class Setting:
    """What holds for steps in which every rank did the same as in each other: who is a data coordinate, what is open.

    `coordinates` has shape (num_ranks,): True for the ranks whose tokens count. `owner` is the index of the rank that
    evaluates a rank's loss, `relative` the least and the largest factor of its ways over those of its owner. `several`:
    losses are computed at several lines, or train parameters of their own. `of_elements`: as in ShapeWays.
    """

    coordinates: np.ndarray
    owner: np.ndarray
    relative: np.ndarray
    tolerance: float
    several: bool
    of_elements: bool
    reasons: tuple[str, ...]


@dataclass
class Watch:
    """Takes rounds of several shares of ranks, and gives deviations as soon as all ranks have told of a step. `wanted`:
    the steps that are compared; None: all."""

    ranks: list[int]
    objective: str
    wanted: Container[int] | None = None
    num_judged: int = 0
    num_contributions: int = 0
    num_skipped: int = 0
    tolerance: float = 0.0
    last_step: int | None = None
    first_step: int | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    problems_of: dict[int, list[str]] = field(default_factory=dict)
    series: Series = field(default_factory=Series)

    def __post_init__(self) -> None:
        self._index = {rank: index for index, rank in enumerate(self.ranks)}
        self._shapes: list[ShapeWays] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._base: int | None = None
        self._told = np.full(len(self.ranks), -1, dtype=np.int64)
        self._settings: dict[bytes, Setting] = {}
        self._allocate(START_STEPS)

    def _allocate(self, num_steps: int) -> None:
        shape = (len(self.ranks), num_steps)
        self._way = np.full(shape, -1, dtype=np.int32)
        self._tokens, self._hashes = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        self._low, self._high = np.full(shape, np.nan), np.full(shape, np.nan)
        self._contributions = np.zeros(shape, dtype=np.int32)
        self._mixed = np.zeros(shape, dtype=bool)
        self._loss, self._norm = np.full(shape, np.nan), np.full(shape, np.nan)

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (self._way, self._tokens, self._hashes, self._low, self._high, self._contributions, self._mixed,
                self._loss, self._norm)  # fmt: skip

    @property
    def problems(self) -> list[str]:
        """What could not be read or compared, in the order of ranks, whoever read them."""
        return [f"rank {rank}: {text}" for rank, texts in sorted(self.problems_of.items()) for text in texts]

    def take(self, told: Mapping[int, Round]) -> Iterator[Deviation]:
        """What the shares of the ranks told in one round, by share. All shares are heard before anything is judged: how
        the ranks are shared out changes nothing."""
        for share, round_ in told.items():
            self._hear(share, round_)
        yield from self._judge()

    def _hear(self, share: int, told: Round) -> None:
        for number, shape in told.shapes.items():
            self._numbers[share, number] = len(self._shapes)
            self._shapes.append(shape)
        for summary in told.summaries:
            self._keep(summary, self._numbers[share, summary.way])
        for rank, damage in told.ended.items():
            self._told[self._index[rank]] = np.iinfo(np.int64).max
            self.problems_of.setdefault(rank, []).extend(damage)

    def _keep(self, summary: Summary, way: int) -> None:
        index, first, count = self._index[summary.rank], summary.first_step, len(summary.low)
        if self._base is None:
            self._base = first
        ahead, limit = max(first + count - self._base, self._base - first), max(MAX_AHEAD, MAX_CELLS // len(self.ranks))
        if ahead > limit:
            self.problems_of.setdefault(summary.rank, []).append(
                f"the {count} steps from step {first} are {ahead} steps away from those of the other ranks, and were "
                "not compared"
            )
            return
        if first < self._base:
            self._shift(first - self._base)
        at = first - self._base
        if at + count > self._way.shape[1]:
            self._grow(at + count)
        where = (index, slice(at, at + count))
        self._way[where], self._tokens[where], self._hashes[where] = way, summary.num_tokens, summary.hashes
        self._low[where], self._high[where], self._contributions[where] = (
            summary.low,
            summary.high,
            summary.num_contributions,
        )
        self._loss[where], self._norm[where] = summary.loss, summary.norm
        if summary.mixed is not None:
            self._mixed[where] = summary.mixed
        self._told[index] = first + count

    def _grow(self, num_steps: int) -> None:
        old = self._arrays
        self._allocate(max(num_steps, 2 * old[0].shape[1]))
        for new, before in zip(self._arrays, old, strict=True):
            new[:, : before.shape[1]] = before

    def _shift(self, steps: int) -> None:
        """Forget the first `steps` columns, or make room before them where it is negative."""
        assert self._base is not None
        old = self._arrays
        self._allocate(old[0].shape[1] + max(-steps, 0))
        for new, before in zip(self._arrays, old, strict=True):
            if steps >= 0:
                new[:, : before.shape[1] - steps] = before[:, steps:]
            else:
                new[:, -steps : before.shape[1] - steps] = before
        self._base += steps

    def _judge(self) -> Iterator[Deviation]:
        """All steps of which every rank has told. A rank whose file has ended tells no more."""
        if self._base is None:
            return
        until = int(min(self._told.min() - self._base, self._way.shape[1]))
        if until <= 0:
            return
        present = self._way[:, :until] >= 0
        steps = np.flatnonzero(present.any(axis=0))
        if self.wanted is not None:
            steps = steps[[step in self.wanted for step in (steps + self._base).tolist()]]
        for same in _runs_of_equal(self._way[:, steps]):
            yield from self._judge_alike(steps[same])
        self._shift(until)

    def _judge_alike(self, columns: np.ndarray) -> Iterator[Deviation]:
        """Steps in which each rank went one and the same way."""
        assert self._base is not None
        ways = self._way[:, columns[0]]
        steps = columns + self._base
        self.first_step = int(steps[0]) if self.first_step is None else self.first_step
        self.last_step = int(steps[-1])
        if not any(self._shapes[way].optimized for way in ways if way >= 0):
            self.num_skipped += len(steps)
            return
        hashes = self._hashes[:, columns]
        for alike in _runs_of_equal(_duplicates(hashes)):
            yield from self._compare(ways, columns[alike], _duplicates(hashes[:, alike[:1]])[:, 0])

    def _compare(self, ways: np.ndarray, columns: np.ndarray, same_labels: np.ndarray) -> Iterator[Deviation]:
        assert self._base is not None
        key = ways.tobytes() + same_labels.tobytes()
        setting = self._settings.get(key)
        if setting is None:
            setting = self._settings[key] = find_setting(ways, self._shapes, self.ranks, same_labels)
        self.tolerance = max(self.tolerance, setting.tolerance)
        self._keep_series(columns, setting)
        mixed = self._mixed[:, columns].any(axis=0)
        mixed_reason = "tokens of one loss have unequal weights, or several passes have one loss"
        open_steps = dict.fromkeys(setting.reasons, len(columns)) or {mixed_reason: int(mixed.sum())}
        for reason, count in open_steps.items():
            if count:
                self.reasons[reason] = self.reasons.get(reason, 0) + count
        if setting.reasons:
            return
        columns = columns[~mixed]
        counted = setting.coordinates
        tokens = self._tokens[np.ix_(counted, columns)].sum(axis=0)
        num_contributions = self._contributions[np.ix_(counted, columns)].sum(axis=0)
        num_ranks = (self._tokens[np.ix_(counted, columns)] > 0).sum(axis=0)
        expected = expected_weight(self.objective, tokens, num_contributions, num_ranks)
        low = self._low[np.ix_(setting.owner, columns)] / expected * setting.relative[:, :1]
        high = self._high[np.ix_(setting.owner, columns)] / expected * setting.relative[:, 1:]
        own = self._tokens[np.ix_(setting.owner, columns)]
        # A safeguard against empty masks is a share of each pass's count, of which only the mean is known.
        safeguards = SAFEGUARD * self._contributions[np.ix_(setting.owner, columns)] / np.maximum(own, 1)
        near = np.maximum(setting.tolerance, safeguards)
        right = (np.abs(low - 1) <= near) & (np.abs(high - 1) <= near)
        right |= own == 0  # nothing of such a rank has a weight
        self.num_judged += len(columns)
        self.num_contributions += int(num_contributions.sum())
        for at in np.flatnonzero(~right.all(axis=0)):
            wrong = np.flatnonzero(~right[:, at])
            yield Deviation(
                step=int(columns[at]) + self._base,
                ranks=tuple(self.ranks[index] for index in wrong),
                low=float(low[wrong, at].min()),
                high=float(high[wrong, at].max()),
                expected=float(expected[at]),
                excuse=_excuse(low[:, at], high[:, at], right[:, at], setting),
            )

    def _keep_series(self, columns: np.ndarray, setting: Setting) -> None:
        assert self._base is not None
        counted = np.ix_(setting.coordinates, columns)
        tokens, steps = self._tokens[counted].sum(axis=0), columns + self._base
        self.series.add("num_tokens", steps, np.where(tokens > 0, tokens, np.nan))
        with np.errstate(divide="ignore", invalid="ignore"):
            self.series.add("loss", steps, self._loss[counted].sum(axis=0) / tokens)
        norms = self._norm[:, columns]
        told = np.flatnonzero(~np.isnan(norms).all(axis=1))
        if len(told):
            self.series.add("grad_norm", steps, norms[told[0]])


def expected_weight(
    objective: str, num_tokens: np.ndarray, num_contributions: np.ndarray, num_ranks: np.ndarray
) -> np.ndarray:
    """What q (summaries.py) must be, for the tokens of steps, and the contributions and data coordinates that have any,
    shape (num_steps,) each."""
    with np.errstate(divide="ignore"):
        known: dict[str, np.ndarray] = {
            "global-token-mean": 1.0 / num_tokens,
            "microbatch-mean": 1.0 / num_contributions,
            "rank-token-mean": 1.0 / num_ranks,
        }
    return known.get(objective, np.ones(len(num_tokens)))


def _excuse(low: np.ndarray, high: np.ndarray, right: np.ndarray, setting: Setting) -> str:
    """Why a step may be right though it is documented otherwise, in words; ratios and whether they are right, shape
    (num_ranks,)."""
    if (low[~right] == 0).any():
        return EMPTIED
    if setting.of_elements:
        return OF_ELEMENTS
    if setting.several:
        return SEVERAL
    alike = np.abs(high - low) <= setting.tolerance * np.abs(high)
    return DIVIDED if not right.any() and bool((alike & (low > 1)).all()) else ""


def _runs_of_equal(matrix: np.ndarray) -> list[np.ndarray]:
    """The columns of a matrix in runs of equal ones, as indices."""
    if not matrix.shape[1]:
        return []
    changes = np.flatnonzero((matrix[:, 1:] != matrix[:, :-1]).any(axis=0)) + 1
    return np.split(np.arange(matrix.shape[1]), changes)


def _duplicates(hashes: np.ndarray) -> np.ndarray:
    """For every rank (row) the first rank with the same labels in a step (column), else itself. 0 equals nothing."""
    own = np.broadcast_to(np.arange(len(hashes))[:, None], hashes.shape)
    ordered = np.sort(hashes, axis=0)
    repeated = ((ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)).any(axis=0)
    if not repeated.any():
        return own
    result = own.copy()
    for column in np.flatnonzero(repeated):
        first: dict[int, int] = {}
        for row, value in enumerate(hashes[:, column].tolist()):
            result[row, column] = first.setdefault(value, row) if value else row
    return result


def find_setting(ways: np.ndarray, shapes: list[ShapeWays], ranks: list[int], same_labels: np.ndarray) -> Setting:
    """Who is a data coordinate, and what is left open, in steps in which the ranks went these ways.

    Ranks that evaluate the same labels are one coordinate (tensor parallel), unless one reduction joins them: then they
    were fed the same batch. A rank without a loss has that of its pipeline's last stage.
    """
    reasons: list[str] = []
    of_rank: Mapping[int, ShapeWays | None] = {
        index: shapes[way] if way >= 0 else None for index, way in enumerate(ways.tolist())
    }
    place = {rank: index for index, rank in enumerate(ranks)}
    missing = [ranks[index] for index, shape in of_rank.items() if shape is None]
    if missing:
        reasons.append(f"rank {missing[0]}{' and others' * (len(missing) > 1)} recorded nothing of them")
    evaluates = np.array([shape is not None and bool(shape.weight_rows) for shape in of_rank.values()])
    owner = np.arange(len(ranks))
    for index, shape in of_rank.items():
        if shape is None or evaluates[index]:
            continue
        owners = [place[peer] for peer in shape.pipeline if peer in place and evaluates[place[peer]]]
        if owners:
            owner[index] = owners[0]
        elif not shape.reasons:
            reasons.append(NO_LOSS)
    coordinates = evaluates.copy()
    for copy in np.flatnonzero(same_labels != np.arange(len(ranks))).tolist():
        first = ranks[int(same_labels[copy])]
        shape = of_rank[copy]
        if shape is not None and not any(first in group for way in shape.ways for group in way.groups):
            coordinates[copy] = False
    losses = {shape.of_elements for shape in of_rank.values() if shape is not None and shape.weight_rows}
    if len(losses) > 1:
        reasons.append(UNCOUNTED)
    relative = np.ones((len(ranks), 2))
    for index, shape in of_rank.items():
        if shape is None:
            continue
        reasons += shape.reasons
        if not shape.ways:
            reasons.append("no optimizer was seen reading a gradient on some rank")
        elif any(way.num_joined != coordinates.sum() for way in shape.ways):
            # Where a loss counts no tokens nobody knows who a data rank is.
            if not any(one.reasons for one in of_rank.values() if one is not None):
                joins = "no recorded reduction joins the gradients of exactly all data ranks"
                reasons.append(UNCOUNTED if True in losses else joins)
        else:
            last = of_rank[int(owner[index])]
            if index != owner[index] and last is not None:
                relative[index] = _relative(shape, last)
    tolerance = max((shape.tolerance for shape in of_rank.values() if shape is not None), default=0.0)
    several = any(shape.several for shape in of_rank.values() if shape is not None)
    reasons = list(dict.fromkeys(reasons))
    return Setting(coordinates, owner, relative, tolerance, several, True in losses, tuple(reasons))


def _relative(shape: ShapeWays, last: ShapeWays) -> tuple[float, float]:
    """The least and the largest factor of a pipeline stage over that of the stage that evaluates the loss."""

    def by_slot(one: ShapeWays, way: Way) -> dict[tuple[int, int], float]:
        return dict(zip(one.slots, way.factors, strict=True))

    quotients = [
        factor / reference[slot]
        for reference in (by_slot(last, way) for way in last.ways[:1])
        for way in shape.ways
        for slot, factor in by_slot(shape, way).items()
        if reference.get(slot) and factor == factor
    ]
    return (min(quotients), max(quotients)) if quotients else (1.0, 1.0)
