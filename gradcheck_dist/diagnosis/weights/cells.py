"""The ratio matrix: observed / expected for every contribution, parameter and rank that holds the parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import isnan

import numpy as np

from gradcheck_dist.events import AmpUnscale, Clip, OptimizerStep, Reduce, ScaleGrads
from gradcheck_dist.ledger.buffers import Entry, Replay
from gradcheck_dist.ledger.composed import made_up_of
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.leaves import build_basis
from gradcheck_dist.ledger.replay import replay
from gradcheck_dist.ledger.solve import EPSILON, solve
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track
from gradcheck_dist.ledger.transit import Hop, Transits, gain

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
LEAST_ELEMENTS = 64
"""Of a smaller parameter (a bias) its larger neighbours tell."""
TOO_FEW = "too few of its elements are sampled on this rank"
COUNTS_NOTHING = "the losses of its passes count nothing, so nothing says what it should weigh"


@dataclass
class Cell:
    """One contribution's weight in one parameter's gradient on one rank. `ratio` is observed / expected.

    `root_ratio` is the weight at the loss / expected, `column` the index in the basis of the parameter's replay.
    `tolerance` and `stderr` are relative to the larger of observed and expected. A ratio that is off by less than
    `material` is right however well it is known.
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

    @property
    def margin(self) -> float:
        """The tolerance as a difference of ratios: what is off once for all scales with the ratio, noise does not."""
        noise = SIGMAS * self.stderr
        return max(self.tolerance - noise, 0.0) * abs(self.ratio) + noise * max(abs(self.ratio), 1.0)

    @property
    def right(self) -> bool:
        return abs(self.ratio - 1.0) <= max(self.margin, self.material)


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
    not looked at themselves.
    """

    param: ParamKey
    rank: int
    replay: Replay
    observed: np.ndarray | None = None
    stderr: np.ndarray | None = None
    nominal: np.ndarray | None = None
    partial: bool = False
    visible: list[bool] = field(default_factory=list)
    elsewhere: frozenset[int] = frozenset()
    hops: dict[int, tuple[Hop, ...]] = field(default_factory=dict)
    clip_by_hand: float = 1.0
    cells: list[Cell] = field(default_factory=list)
    num_unknown: int = 0
    reason: str = ""
    changed_in: str = ""
    alike: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which this tells."""
        return (self.rank, *self.alike)

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


def measure(data: StepData, contributions: Contributions, on_the_way: Transits | None = None) -> list[Held]:
    """Replay every parameter that an optimizer owns, on every rank that holds it."""
    held: list[Held] = []
    for key, tracks in sorted(data.tracks.items()):
        copy = data.beside.get(key)
        basis = build_basis(tracks, contributions, data.tracks.get(copy) if copy is not None else None)
        if not len(basis):
            continue
        played = replay(data, tracks, basis)
        mine = [track for _, track in sorted(tracks.items()) if _optimized(data, track)]
        of_param = [_transfer(key, track, played) for track in mine if not _left_to_others(data, track, tracks)]
        for one in of_param:
            _leave_to_others(one, tracks[one.rank], contributions)
        _pool_shards(of_param, tracks, played)
        if on_the_way is not None and on_the_way.hops:
            for one in of_param:
                _carry(one, key[0], on_the_way)
        held += of_param
    return held


def _leave_to_others(held: Held, track: Track, contributions: Contributions) -> None:
    """Of a gradient that is the sum over ranks with tokens of their own, each rank's summand holds its own tokens."""
    over = track.points[-1].values.over if track.points else ()
    place = contributions.coordinate
    others = {place[rank] for rank in over if rank in place} - {place.get(held.rank)}
    if others:
        held.elsewhere = frozenset(others)
        keys = held.replay.basis.keys
        held.visible = [seen and key[0] not in others for seen, key in zip(held.visible, keys, strict=True)]


def _carry(held: Held, stage: int, on_the_way: Transits) -> None:
    """A leaf that differentiates what came scaled from another stage weighs more or less than it shows."""
    basis = held.replay.basis
    for column, (key, origin) in enumerate(zip(basis.keys, basis.origin, strict=True)):
        hops = on_the_way.on_the_way(origin, stage, key[1:])
        if hops:
            held.hops[column] = hops
    if held.hops and held.observed is not None and held.stderr is not None:
        gains = np.array([gain(held.hops.get(column, ())) for column in range(len(basis))])
        noise = np.array([sum(hop.noise for hop in held.hops.get(column, ())) for column in range(len(basis))])
        held.observed = held.observed * gains
        held.stderr = np.abs(held.stderr * gains) + np.abs(held.observed) * noise


def _pool_shards(of_param: list[Held], tracks: dict[int, Track], played: Replay) -> None:
    """Shards too small to be solved alone are solved together with those that came out of the same reductions: one set
    of weights for all of them, which the residual confirms or refutes."""
    groups: dict[tuple[int, ...], list[Held]] = {}
    for held in of_param:
        if held.reason == TOO_FEW or held.observed is not None:
            groups.setdefault(_joined(held), []).append(held)
    for sources, members in groups.items():
        small = [held for held in members if held.reason == TOO_FEW or _is_as_documented(held)]
        if not small or not sources:
            continue
        whole = np.full(played.basis.values.shape[1], np.nan)
        for held in members:
            whole = np.where(np.isnan(whole), _read(held, tracks, played), whole)
        small = [held for held in small if _is_part(_read(held, tracks, played), whole, played.epsilon)]
        if not small:
            continue
        told = _of_leaves(whole, small[0], played) or _of_summands(whole, small[0], played)
        if told is None:
            continue
        for held in small:
            held.observed, held.stderr, held.reason = told[0], np.nan_to_num(told[1]), ""


def _read(held: Held, tracks: dict[int, Track], played: Replay) -> np.ndarray:
    """The last sample on a rank, freed of recorded clips."""
    final = played.final(held.rank)
    return tracks[held.rank].points[-1].values.data / (final.clip if final is not None else 1.0)


def _is_part(values: np.ndarray, whole: np.ndarray, epsilon: float) -> bool:
    """Whether a rank has what stands in the whole, and no copy with other values: of such the whole tells nothing."""
    held = np.isfinite(values) & np.isfinite(whole)
    off = float(np.linalg.norm(values[held] - whole[held]))
    return off <= max(MATERIAL, 4 * epsilon) * float(np.linalg.norm(whole[held]))


def _is_as_documented(held: Held) -> bool:
    """Whether its few elements could only confirm the records, and do not show the columns that are zero on them."""
    final = held.replay.final(held.rank)
    return final is not None and final.solution is not None and final.solution.as_documented


def _of_leaves(whole: np.ndarray, held: Held, played: Replay) -> tuple[np.ndarray, np.ndarray] | None:
    """The weights of all contributions in a gradient, and their standard errors."""
    rows = ~np.isnan(whole) & ~np.isnan(played.basis.values).any(axis=0)
    nominal = held.nominal if held.nominal is not None else np.zeros(len(played.basis))
    solution = solve(played.basis.values[:, rows].T, whole[rows], played.epsilon, nominal) if rows.any() else None
    if solution is None or not (solution.fits and solution.checked):
        return None
    return solution.coefficients, solution.stderr


def _of_summands(whole: np.ndarray, held: Held, played: Replay) -> tuple[np.ndarray, np.ndarray] | None:
    """The same from what the ranks brought into the last reduction, which was measured: of many accumulation steps and
    ranks there are fewer sums than contributions."""
    final = played.final(held.rank)
    if final is None or not final.made_of or np.isfinite(whole).sum() < LEAST_ELEMENTS:
        return None
    columns = [column.times(1.0 / final.clip) for column in final.made_of]
    found = made_up_of(columns, whole, played.epsilon, len(played.basis))
    if found is None or not (found[3].fits and found[3].checked):
        return None
    return found[0], found[1]


def _joined(held: Held) -> tuple[int, ...]:
    """The ranks whose gradients came together in what this one holds: equal for shards of one gradient, and not for
    those of replicas that nothing joined."""
    reduced = [entry for entry in held.replay.history(held.rank) if isinstance(entry.event, Reduce)]
    return tuple(sorted({source for entry in reduced for source in entry.sources}))


def _optimized(data: StepData, track: Track) -> bool:
    """Whether an optimizer of this rank owns the parameter. Before any optimizer step all are taken to be owned."""
    steps = [event for event in data.events[track.rank] if isinstance(event, OptimizerStep)]
    return not steps or any(track.param.id in data.params_of(track.rank, event.params) for event in steps)


def _left_to_others(data: StepData, track: Track, others: Mapping[int, Track]) -> bool:
    """Whether an optimizer that lists all parameters (fairscale's OSS) has others inside of it step them, each rank
    some: one of another rank steps this one, and none of this rank's does."""
    inner = any(isinstance(event, OptimizerStep) and event.inside is not None for event in data.events[track.rank])
    return inner and not _steps_inside(data, track) and any(_steps_inside(data, each) for each in others.values())


def _steps_inside(data: StepData, track: Track) -> bool:
    steps = (event for event in data.events[track.rank] if isinstance(event, OptimizerStep))
    of_inner = (data.params_of(track.rank, event.params) for event in steps if event.inside is not None)
    return any(track.param.id in params for params in of_inner)


def _transfer(key: ParamKey, track: Track, played: Replay) -> Held:
    held = Held(key, track.rank, played, partial=bool(track.points) and track.points[-1].values.partial)
    held.visible = (np.isfinite(played.basis.values) & _part(track)).any(axis=1).tolist()
    final = played.final(track.rank)
    if final is None or not final.sampled:
        if not any(isinstance(entry.event, OptimizerStep) for entry in played.entries.get(track.rank, ())):
            held.reason = "the step ended before the optimizer read it"
            return held
        zeros = np.zeros(len(played.basis))  # .grad was None when the optimizer came
        held.observed, held.stderr = zeros, zeros
        held.nominal = final.nominal / final.clip if final is not None else zeros
    elif final.observed is None or final.stderr is None:
        held.reason = _why_unsolved(final, played)
        held.nominal = final.nominal / final.clip
    else:
        held.observed, held.stderr = final.observed / final.clip, final.stderr / final.clip
        held.nominal = final.nominal / final.clip
    return held


def _part(track: Track) -> np.ndarray:
    """Which of a parameter's sampled positions a rank holds at the end: of the sharded gradient, else of the leaves."""
    last = [track.points[-1].values] if track.points else [values for _, values in track.leaves.values()]
    held = np.zeros(track.param.num_positions, dtype=bool)
    for values in last:
        held |= ~np.isnan(values.data)
    return held


def _why_unsolved(final: Entry, played: Replay) -> str:
    if played.incomplete:
        missing = ", ".join(map(str, sorted(played.incomplete)))
        return f"a reduction needed rank(s) {missing}, whose trace is missing"
    if final.solution is not None and not final.solution.fits:
        return (
            f"its gradient is no combination of the recorded contributions (residual {final.solution.residual:.1e}): "
            "something that no probe saw added to it"
        )
    return TOO_FEW


@dataclass(frozen=True, slots=True)
class _Due:
    """What a contribution's weight has to be, and what it was multiplied by at the loss."""

    expected: Fraction
    weight: float
    root: float
    loss_epsilon: float
    material: float


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
        dues[key] = _Due(weight, float(weight), contribution.weight, loss_epsilon, allowed)
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
    for key, groups in _columns(held.replay.basis.keys, held.partial):
        due = dues.get(key)
        if due is None:
            continue
        root, weight = due.root, due.weight
        for group in groups:
            if not any(held.visible[column] for column in group):
                continue
            seen, size, error = 0.0, weight, 0.0  # what is multiplied by zero at the loss needs no measurement
            if root:
                seen = _sum(held.observed, group) * root
                size = max(abs(seen), weight)
                error = _length(held.stderr, group) * abs(root) / size
            surely_wrong = abs(seen - weight) > 2 * SIGMAS * error * size
            if isnan(seen) or (error > MAX_STDERR and not surely_wrong):
                result.num_unknown += 1
                continue
            result.cells.append(
                Cell(
                    key=key,
                    column=group[0],
                    expected=due.expected,
                    root_ratio=root / weight,
                    nominal=_sum(held.nominal, group) * root,
                    observed=seen,
                    ratio=seen / weight,
                    tolerance=systematic(epsilon, due.loss_epsilon, num_scalings) + SIGMAS * error,
                    stderr=error,
                    material=due.material,
                )
            )
    if not result.cells and not counts:
        result.reason = COUNTS_NOTHING
    elif not result.cells:
        result.reason = "its sampled gradient is zero or too small to be told from rounding"
    return result


def _sum(values: np.ndarray, group: Sequence[int]) -> float:
    return float(values[group[0]]) if len(group) == 1 else float(values[group].sum())


def _length(errors: np.ndarray, group: Sequence[int]) -> float:
    return float(errors[group[0]]) if len(group) == 1 else float(np.sqrt((errors[group] ** 2).sum()))


def _columns(keys: list[ContributionKey], partial: bool) -> list[tuple[ContributionKey, list[list[int]]]]:
    """The columns of each contribution: judged one by one, or, where the gradient itself is declared a partial sum,
    together (each rank then holds its own summand)."""
    of_key: dict[ContributionKey, list[int]] = {}
    for index, key in enumerate(keys):
        of_key.setdefault(key, []).append(index)
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
    best = min(cells, key=lambda cell: cell.stderr)
    weights = np.array([1.0 / max(cell.stderr, 1e-12) ** 2 for cell in cells])
    ratio = float(np.average([cell.ratio for cell in cells], weights=weights))
    stderr = float(weights.sum() ** -0.5)
    constant = best.tolerance - SIGMAS * best.stderr
    return replace(
        best, ratio=ratio, observed=ratio * float(best.expected), stderr=stderr, tolerance=constant + SIGMAS * stderr
    )
