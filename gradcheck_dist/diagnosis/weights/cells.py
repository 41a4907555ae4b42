"""The ratio matrix: observed / expected for every contribution, parameter and rank that holds the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import fsum, isnan

import numpy as np

from gradcheck_dist.diagnosis.weights.rounded import rounded_to
from gradcheck_dist.events import AmpUnscale, Clip, Reduce, ScaleGrads
from gradcheck_dist.ledger.buffers import Replay
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.leaves import Basis
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.ledger.transit import Hop

MAX_STDERR = 0.1
"""Relative standard error above which one parameter's weight is not known well enough to be judged alone."""

SIGMAS = 6.0
MATERIAL = 1e-5
"""A weight nearer to its expected value than this is right at any precision: gradients of one step, summed in two
orders in float32, were measured up to 1.6e-6 apart, and no scale bug is a factor so near to 1."""
SAFEGUARD = 2e-4
"""Tokens. What programs add to a count lest it be zero; a count that is wrong is off by one at least."""

MAX_SPREAD = 1e-3
"""Relative spread of the tokens' weights in one contribution above which they have no common weight."""
GONE = 1e-3
"""A weight, relative to the right one, that is as good as none."""
FAR = 20.0
"""So many margins from zero a weight is there, however small it is: divided by tokens in every pass, say."""
TOO_SMALL = "its sampled gradient is zero or too small to be told from rounding"
SUMMANDS_ALIKE = "its ranks' summands are alike, as of shards that began so: what came of each is not told apart"
EQUAL = "all ranks' gradients of it are equal, so that their mean, which other gradients show, is each of them"
COUNTED_AGAIN = "is a summand (a DTensor's Partial) and holds other ranks' contributions, which the sum counts again"
TOO_FEW = "too few of its elements are sampled on this rank"
COUNTS_NOTHING = "the losses of its passes count nothing, so nothing says what it should weigh"


def weighs_nothing(ratio: float, margin: float, largest: float = 1.0) -> bool:
    """Whether a weight known to `margin` is none, beside others of up to `largest`. All are relative to right ones."""
    return abs(ratio) <= max(margin, min(GONE * largest, FAR * margin))


@dataclass(slots=True)
class Cell:
    """One contribution's weight in one parameter's gradient on one rank. `ratio` is observed / expected.

    `root_ratio` is the weight at the loss / expected, `column` the index in the basis of the parameter's replay.
    `tolerance` and `stderr` are relative to the larger of observed and expected. A ratio that is off by less than
    `material` is right however well it is known. Of a gradient that is a sum over ranks `column` is the holder's own
    summand, and `summands` are the columns of the others, which weigh nothing here unless something brought them.
    """

    key: ContributionKey
    column: int
    expected: Fraction
    root_ratio: float
    nominal: float
    observed: float
    ratio: float
    tolerance: float
    stderr: float
    material: float = 0.0
    summands: tuple[int, ...] = ()

    @property
    def columns(self) -> tuple[int, ...]:
        return (self.column, *self.summands)

    @property
    def margin(self) -> float:
        """The tolerance as a difference of ratios: what is off once for all scales with the ratio, noise does not."""
        noise = SIGMAS * self.stderr
        return max(self.tolerance - noise, 0.0) * abs(self.ratio) + noise * max(abs(self.ratio), 1.0)

    @property
    def right(self) -> bool:
        return abs(self.ratio - 1.0) <= max(self.margin, self.material)

    @property
    def gone(self) -> bool:
        return weighs_nothing(self.ratio, self.margin)


@dataclass
class Held:
    """One parameter on one rank that holds it: its cells, or the reason why there are none.

    `observed`, `stderr` and `nominal` are transfers from the columns of the basis to the gradient that the optimizer
    read, freed of clipping; None where they could not be measured. `visible` tells of each column whether it reaches
    into the part of the parameter that this rank holds: an expert's leaf on its own rank holds the tokens of the whole
    expert-parallel group, and the other ranks' leaves are of other experts. `changed_in`: which lines made it something
    else than a combination of contributions, in words. `hops` changed a column's gradient on its way between pipeline
    stages, before it came to the parameter; `observed` contains them. `elsewhere` are data coordinates whose
    tokens are in other ranks' summands of the same gradient. `clip_by_hand` is the coefficient of a clip that nobody
    recorded, where `observed` is freed of one. `alike` are ranks of a large world that came out like this one, and are
    not looked at themselves. `mean`: by so many the sum of the ranks' summands is divided, or was. `parts`: of so many
    equal parts on as many ranks, each rank's gradient is one, and their sum is the whole one.
    """

    param: ParamKey
    rank: int
    replay: Replay
    observed: np.ndarray | None = None
    stderr: np.ndarray | None = None
    nominal: np.ndarray | None = None
    partial: bool = False
    mean: int = 1
    visible: list[bool] = field(default_factory=list)
    zeros: frozenset[int] = frozenset()
    elsewhere: frozenset[int] = frozenset()
    hops: dict[int, tuple[Hop, ...]] = field(default_factory=dict)
    clip_by_hand: float = 1.0
    cells: list[Cell] = field(default_factory=list)
    num_unknown: int = 0
    reason: str = ""
    changed_in: str = ""
    alike: tuple[int, ...] = ()
    parts: int = 1

    def freed(self, factor: float) -> Held:
        """The same, freed of a clip that nobody recorded and that multiplied it by `factor`."""
        if self.observed is None or self.stderr is None:
            return self
        return replace(self, observed=self.observed / factor, stderr=self.stderr / factor, clip_by_hand=factor)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which this tells."""
        return (self.rank, *self.alike)

    @property
    def is_gone(self) -> bool:
        """Whether nothing of any contribution is left in it, which is so whatever it was multiplied by besides."""
        return bool(self.cells) and all(abs(cell.ratio) <= GONE for cell in self.cells)

    def has_zero_summand(self, key: ContributionKey) -> bool:
        """Whether what came here of a contribution, by the records or as this rank's own, is a summand that is all
        zeros: whether it weighs anything does not show."""
        basis = self.replay.basis
        own = basis.of.get((self.rank, *key[1:]))
        return any(
            basis.keys[column] == key and (column == own or (self.nominal is not None and self.nominal[column] != 0))
            for column in self.zeros
        )

    @cached_property
    def digits(self) -> tuple[object, ...]:
        """The cells, rounded: equal for parameters that came out the same."""
        return tuple((cell.key, cell.column, round(cell.ratio, 3)) for cell in self.cells)

    @cached_property
    def events(self) -> tuple[int, ...]:
        """The events that concerned the parameter: equal for parameters with one gradient path."""
        return tuple(entry.seq for entry in self.replay.history(self.rank) if entry.event is not None)

    @property
    def num_scalings(self) -> int:
        """Events that multiply by a constant of their own."""
        scaling = (Reduce, ScaleGrads, AmpUnscale, Clip)
        return sum(isinstance(entry.event, scaling) for entry in self.replay.history(self.rank))

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Equal for parameters that went the same way and came out the same."""
        return (self.param[0], self.rank, self.events, self.digits)


@dataclass(frozen=True, slots=True)
class _Due:
    """What a contribution's weight has to be, and what it was multiplied by at the loss."""

    expected: Fraction
    weight: float
    root: float
    loss_epsilon: float
    material: float
    num_tokens: int


def judge(measured: list[Held], contributions: Contributions, expected: dict[ContributionKey, Fraction]) -> list[Held]:
    """The same parameters with their cells: what was measured, over what is expected."""
    dues: dict[ContributionKey, _Due] = {}
    for key, weight in expected.items():
        contribution = contributions.by_key.get(key)
        if contribution is None or contribution.weight is None or contribution.spread > MAX_SPREAD:
            continue
        # A loss that was not seen may have been of any dtype.
        loss_epsilon = EPSILON.get(contribution.loss.dtype if contribution.loss else "bfloat16", 2.0**-23)
        allowed = material(contribution.num_tokens)
        dues[key] = _Due(
            weight, float(weight), contribution.weight, loss_epsilon, allowed, contribution.num_tokens or 1
        )
    return [
        _with_cells(held, dues, not expected or any(key in expected for key in held.replay.basis.keys))
        for held in measured
    ]


def _with_cells(held: Held, dues: dict[ContributionKey, _Due], counts: bool) -> Held:
    """`counts`: whether a weight is expected of any of the parameter's contributions."""
    result = replace(held, cells=[], num_unknown=0)
    if held.observed is None or held.stderr is None or held.nominal is None:
        return result
    num_scalings, epsilon = held.num_scalings, held.replay.epsilon
    visible, empty = held.visible, held.replay.basis.empty
    for key, groups in _columns(held.replay.basis, held.partial):
        due = dues.get(key)
        if due is None:
            continue
        root, weight = due.root / held.parts, due.weight
        for group in groups:
            if not any(visible[column] and column not in empty for column in group):
                continue
            seen, size, error = 0.0, weight, 0.0  # what is multiplied by zero at the loss needs no measurement
            if root:
                seen = _sum(held.observed, group) * root
                size = max(abs(seen), weight)
                error = _length(held.stderr, group) * abs(root) / size
            surely_wrong = abs(seen - weight) > 2 * SIGMAS * error * size
            if isnan(seen) or isnan(error) or (error > MAX_STDERR and not surely_wrong):
                result.num_unknown += 1
                continue
            own = group[0] if len(group) == 1 else _own_summand(held, group)
            off = seen and root and abs(seen - weight) > MATERIAL * weight
            rounded = rounded_to(root * weight / seen, root, due.num_tokens) if off else 0.0
            result.cells.append(
                Cell(
                    key=key,
                    column=own,
                    summands=tuple(column for column in group if column != own),
                    expected=due.expected,
                    root_ratio=root / weight,
                    nominal=_sum(held.nominal, group) * root,
                    observed=seen,
                    ratio=seen / weight,
                    tolerance=systematic(epsilon, max(due.loss_epsilon, rounded), num_scalings) + SIGMAS * error,
                    stderr=error,
                    material=due.material,
                )
            )
    if not result.cells and not counts:
        result.reason = COUNTS_NOTHING
    elif not result.cells:
        alike = any(_are_alike(held, columns) for columns in held.replay.basis.of_contribution.values())
        result.reason = SUMMANDS_ALIKE if alike else TOO_SMALL
    return result


def _are_alike(held: Held, columns: Sequence[int]) -> bool:
    """Whether one contribution's summands are the same on several ranks, and no zeros."""
    if len(columns) < 2:
        return False
    values = np.nan_to_num(held.replay.basis.values[list(columns)])
    size = float(np.abs(values).max(initial=0.0))
    return size > 0 and float(np.ptp(values, axis=0).max()) <= GONE * size


def _own_summand(held: Held, group: Sequence[int]) -> int:
    """Of one contribution's summands that which is in what this rank holds."""
    origin, nominal = held.replay.basis.origin, held.nominal
    assert nominal is not None
    return max(group, key=lambda column: (origin[column] == held.rank, abs(float(nominal[column]))))


def _sum(values: np.ndarray, group: Sequence[int]) -> float:
    return float(values[group[0]]) if len(group) == 1 else float(values[group].sum())


def _length(errors: np.ndarray, group: Sequence[int]) -> float:
    return float(errors[group[0]]) if len(group) == 1 else float(np.sqrt((errors[group] ** 2).sum()))


def _columns(basis: Basis, partial: bool) -> list[tuple[ContributionKey, list[list[int]]]]:
    """The columns of each contribution: judged one by one, or, where the gradient itself is declared a partial sum,
    together (each rank then holds its own summand)."""
    of_key = basis.of_contribution
    if partial:
        return [(key, [columns]) for key, columns in of_key.items()]
    return [(key, [[column] for column in columns]) for key, columns in of_key.items()]


def systematic(epsilon: float, loss_epsilon: float, num_scalings: int) -> float:
    """The part of a ratio's relative tolerance that no averaging over elements takes away.

    What is rounded element by element has mean zero and widens the standard error of the solve, of which SIGMAS are
    allowed. What is rounded once for all elements is off by up to half a spacing each: the loss's upstream gradient in
    the loss's dtype, the constant of every scaling event (an average, a clip coefficient), and one constant more in the
    gradient's dtype. Never less than MATERIAL.
    """
    return max(0.5 * epsilon * (1 + num_scalings) + 0.5 * loss_epsilon, MATERIAL)


def material(num_tokens: int | None) -> float:
    """How far off, relatively, a weight of one of so many tokens may be and still be right at any precision."""
    return max(MATERIAL, SAFEGUARD / num_tokens if num_tokens else 0.0)


def pool(judged: list[Held]) -> list[Held]:
    """Parameters with one gradient path on one rank, taken together: their weights averaged by inverse variance.

    What is too noisy to be seen in each parameter (many contributions in bfloat16) is seen in all of them. The pooled
    cells stand with the best measured parameter.
    """
    paths: dict[tuple[object, ...], list[Held]] = {}
    for held in judged:
        if held.cells:
            paths.setdefault((held.param[0], held.rank, held.events), []).append(held)
    pooled = []
    for members in paths.values():
        best = min(members, key=lambda held: max(cell.stderr for cell in held.cells) / len(held.cells))
        by_key: dict[tuple[ContributionKey, int], list[Cell]] = {}
        for held in members:
            for cell in held.cells:
                by_key.setdefault((cell.key, cell.column), []).append(cell)
        pooled.append(replace(best, cells=[average(cells) for cells in by_key.values()]))
    return pooled


def average(cells: list[Cell]) -> Cell:
    """Cells of one contribution as one, by inverse variance."""
    if len(cells) == 1:
        return cells[0]
    best = min(cells, key=lambda cell: cell.stderr)
    weights = [max(cell.stderr, 1e-12) ** -2 for cell in cells]
    total = fsum(weights)
    ratio = fsum(weight * cell.ratio for weight, cell in zip(weights, cells, strict=True)) / total
    stderr = total**-0.5
    constant = best.tolerance - SIGMAS * best.stderr
    return replace(
        best, ratio=ratio, observed=ratio * float(best.expected), stderr=stderr, tolerance=constant + SIGMAS * stderr
    )


def loss_rounding(contributions: Contributions) -> float:
    """How far, relatively, rounding of the losses' upstream gradients puts their weights apart."""
    dtypes = {c.loss.dtype if c.loss is not None else "bfloat16" for c in contributions.by_key.values()}
    return 2 * max((EPSILON.get(dtype, EPSILON["float32"]) for dtype in dtypes), default=EPSILON["float32"])
