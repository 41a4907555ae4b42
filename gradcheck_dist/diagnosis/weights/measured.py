"""What each contribution weighs in the gradient that an optimizer read, for every parameter and rank that holds it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import COUNTED_AGAIN, EQUAL, MATERIAL, TOO_FEW, TOO_SMALL, Held
from gradcheck_dist.diagnosis.weights.few_elements import confirm_few
from gradcheck_dist.diagnosis.weights.same_on_ranks import share_out
from gradcheck_dist.events import OptimizerStep, Reduce
from gradcheck_dist.ledger.buffers import Column, Entry, Replay
from gradcheck_dist.ledger.composed import made_up_of
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.inside_steps import reduced_to_others
from gradcheck_dist.ledger.leaves import build_basis
from gradcheck_dist.ledger.replay import replay
from gradcheck_dist.ledger.solve import EPSILON, solve
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track
from gradcheck_dist.ledger.transit import Transits, gain
from gradcheck_dist.wording import numbered

LEAST_ELEMENTS = 64
"""Of a smaller parameter (a bias) its larger neighbours tell."""


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
    confirm_few(data, held)
    _leave_rounding(held, data)
    _leave_equal(held)
    share_out(held, contributions)
    return held


def _leave_rounding(measured: list[Held], data: StepData) -> None:
    """Gradients that are zero but for rounding have no weights. What float32 leaves of terms that cancel (a key's bias,
    the bias below a difference of scores) is below its epsilon, beside the whole model's gradient: few distinct values,
    which another order of additions moves, and which a reduction in float16 drops."""
    sizes = {held.param: _length_of(held.replay.basis.values) for held in measured}
    least = EPSILON["float32"] * sum(size**2 for size in sizes.values()) ** 0.5
    for held in measured:
        points = data.tracks[held.param][held.rank].points
        read = _length_of(points[-1].values.data) if points else 0.0
        if least and max(sizes[held.param], read) <= least:
            held.observed, held.stderr, held.reason = None, None, TOO_SMALL


def _leave_equal(measured: list[Held]) -> None:
    """Beside gradients into which a hand that nobody recorded brought other ranks', one that is what it was may have
    had them, too, where they are equal: the mean of equal numbers is each of them. Signs add up to few values (a bias
    below an L1 loss)."""
    brought = {held.rank for held in measured if _was_brought(held)}
    for held in measured:
        if held.rank in brought and held.observed is not None and not _was_brought(held) and _is_alike(held):
            held.observed, held.stderr, held.reason = None, None, EQUAL


def _was_brought(held: Held) -> bool:
    """Whether something is in a gradient that its records do not bring there."""
    if held.observed is None or held.stderr is None or held.nominal is None:
        return False
    return bool(((held.nominal == 0) & (np.abs(held.observed) > np.maximum(MATERIAL, 6 * held.stderr))).any())


def _is_alike(held: Held) -> bool:
    """Whether all ranks' passes add up to the same numbers."""
    basis = held.replay.basis
    sums: dict[int, np.ndarray] = {}
    for key, values in zip(basis.keys, basis.values, strict=True):
        sums[key[0]] = sums.get(key[0], np.zeros(())) + np.nan_to_num(values)
    first, *others = sums.values()
    return bool(others) and all(
        _length_of(one - first) <= 4 * held.replay.epsilon * _length_of(first) for one in others
    )


def _length_of(values: np.ndarray) -> float:
    return float(np.linalg.norm(np.nan_to_num(values)))


def _leave_to_others(held: Held, track: Track, contributions: Contributions) -> None:
    """Of a gradient that is the sum over ranks with tokens of their own, each rank's summand holds its own tokens."""
    over = track.points[-1].values.over if track.points else ()
    place = contributions.coordinate
    others = {place[rank] for rank in over if rank in place} - {place.get(held.rank)}
    if others:
        held.elsewhere = frozenset(others)
        keys = held.replay.basis.keys
        held.visible = [seen and key[0] not in others for seen, key in zip(held.visible, keys, strict=True)]
        if held.observed is not None and held.stderr is not None:
            off = np.abs(held.observed) > np.maximum(MATERIAL, 6 * held.stderr)
            if any(key[0] in others and is_off for key, is_off in zip(keys, off, strict=True)):
                held.observed, held.stderr, held.reason = None, None, COUNTED_AGAIN


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
        if held.reason == TOO_FEW or held.observed is not None or _given(held):
            groups.setdefault(_joined(held), []).append(held)
    for sources, members in groups.items():
        small = [held for held in members if held.reason == TOO_FEW or _is_as_documented(held) or _given(held)]
        if not small or not sources:
            continue
        whole = np.full(played.basis.values.shape[1], np.nan)
        for held in members:
            whole = np.where(np.isnan(whole), _read(held, tracks, played), whole)
        small = [held for held in small if _is_part(_read(held, tracks, played), whole, played.epsilon)]
        if not small:
            continue
        ways = (_of_leaves, _of_summands, _of_given)
        told = next((found for way in ways if (found := way(whole, small[0], played)) is not None), None)
        if told is None:
            continue
        weights, stderr = told[0], np.nan_to_num(told[1])
        for held in small:
            held.observed, held.stderr, held.reason = weights, stderr, ""
            if (final := played.final(held.rank)) is not None and final.sampled:  # a measurement like any other
                final.observed, final.stderr, final.own = final.clip * weights, final.clip * stderr, final.clip * stderr


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
    found = made_up_of(columns, whole, played.epsilon, len(played.basis), passes=played.basis.passes)
    if found is None or not (found[3].fits and found[3].checked):
        return None
    return found[0], found[1]


def _given(held: Held) -> tuple[Column, ...]:
    """What reductions gave, where what was read is made of something else than the records say."""
    final = held.replay.final(held.rank)
    return final.given if final is not None and held.observed is None else ()


def _of_given(whole: np.ndarray, held: Held, played: Replay) -> tuple[np.ndarray, np.ndarray] | None:
    """The same from what reductions gave, added up by the program."""
    given = _given(held)
    documented = np.ones(len(given))
    found = made_up_of(given, whole, played.epsilon, len(played.basis), documented) if given else None
    return (found[0], found[1]) if found is not None and found[3].fits and found[3].checked else None


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
    """Whether an optimizer lists all parameters and steps some on each rank: it has others inside of it step them
    (fairscale's OSS), and of this one that is on another rank; or it reduced this one's gradient to another rank in its
    own step."""
    if reduced_to_others(data, track):
        return True
    inner = any(isinstance(event, OptimizerStep) and event.inside is not None for event in data.events[track.rank])
    return inner and not _steps_inside(data, track) and any(_steps_inside(data, each) for each in others.values())


def _steps_inside(data: StepData, track: Track) -> bool:
    steps = (event for event in data.events[track.rank] if isinstance(event, OptimizerStep))
    of_inner = (data.params_of(track.rank, event.params) for event in steps if event.inside is not None)
    return any(track.param.id in params for params in of_inner)


def _transfer(key: ParamKey, track: Track, played: Replay) -> Held:
    held = Held(key, track.rank, played)
    if track.points:
        held.partial, held.mean = track.points[-1].values.partial, max(point.values.mean for point in track.points)
    part = np.isfinite(played.basis.values) & _part(track)
    held.visible = part.any(axis=1).tolist()
    there = (part & (played.basis.values != 0)).any(axis=1)
    held.zeros = frozenset(np.flatnonzero(part.any(axis=1) & ~there).tolist())
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
        # What is zero itself on all of these elements is not missing, where a buffer was emptied and filled again.
        unseen = [column for column in held.zeros if final.observed[column] == 0]
        held.observed, held.stderr = final.observed / final.clip, final.stderr / final.clip
        held.observed[unseen] = np.nan
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
        return f"a reduction needed {numbered('rank', played.incomplete)}, whose trace is missing"
    if final.solution is not None and not final.solution.fits:
        return (
            f"its gradient is no combination of the recorded contributions (residual {final.solution.residual:.1e}): "
            "something that no probe saw added to it"
        )
    return TOO_FEW
