"""Parameters of so few elements that their records can only be confirmed: a temperature, a gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import TOO_FEW, Held
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import SCALED, GradWrite
from gradcheck_dist.ledger.buffers import Entry
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.solve import COARSE, RESIDUAL_FACTOR, ROUNDING, SURE_SIGMAS
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import numbered

UNLIKE = 1e-3
"""Relative; copies' gradients that are nearer to one another may differ by rounding."""
SURE = 1e-4
"""What rounding may be of a gradient, relative: more, and numbers that mean nothing would pass for the records'."""
MOST, MOST_ASKED = 8, 32
"""How many kinds of weights of a rank are tried, and of how many of its parameters."""


class Known(NamedTuple):
    """Weights of contributions in a gradient without what its lines multiply by, and their standard errors."""

    keys: tuple[ContributionKey, ...]
    weights: np.ndarray
    stderr: np.ndarray


Place = tuple[int, int, int]
"""Where a gradient is sampled: the rank, after how many other samples, and whether before or behind an event. Each
parameter may have a reduction of its own."""
Writes = Mapping[int, Sequence[GradWrite]]
"""What the program's own lines wrote to gradients, by rank."""


def confirm_few(data: StepData, measured: Sequence[Held]) -> None:
    """Find the weights in gradients of few elements, where what optimizers read is on all ranks, but for rounding, what
    they make of the leaves: those that are documented, those that another gradient of the rank was measured to have
    there, or either times the numbers of the program's own lines. That is one equation for each element, without a free
    number. Where one rank's gradient is something else, nothing is known of the others' either."""
    copies: dict[ParamKey, list[Held]] = {}
    few = (held for held in measured if held.reason == TOO_FEW and held.replay.epsilon <= COARSE)
    for held in few:
        if not held.hops and not held.elsewhere and np.isfinite(_read(data, held)).any():
            copies.setdefault(held.param, []).append(held)
    if not copies:
        return
    writes = {rank: [one for one in events if isinstance(one, GradWrite)] for rank, events in data.events.items()}
    known = _known(data, measured, writes)
    for of_param in copies.values():
        if all(_confirm(data, held, known, writes, last=True) for held in of_param):
            for held in of_param:
                _take_over(held)
    for held in measured:
        if held.observed is not None:  # what was measured in the end, with other shards, may be known on the way, too
            _confirm(data, held, known, writes)


def _take_over(held: Held) -> None:
    """Let the weights be those of what the optimizer read."""
    final = held.replay.final(held.rank)
    if final is not None and final.observed is not None and final.stderr is not None:
        held.observed, held.stderr, held.reason = final.observed / final.clip, final.stderr / final.clip, ""


def unlike_reads(data: StepData, measured: Sequence[Held]) -> list[str]:
    """What is said of copies of few elements whose gradients ranks read unlike, where all that is known is right."""
    copies: dict[ParamKey, list[Held]] = {}
    for held in measured:
        copies.setdefault(held.param, []).append(held)
    found: dict[str, set[int]] = {}
    for param, of_param in copies.items():
        reads = [_read(data, held) for held in of_param if _is_few(held)]
        if len(reads) < max(2, len(of_param)) or not all(np.isfinite(read).all() for read in reads):
            continue
        off = max(float(np.linalg.norm(read - reads[0])) for read in reads)
        rounding = max(UNLIKE, *(RESIDUAL_FACTOR * held.replay.epsilon for held in of_param))
        if off > rounding * max(float(np.linalg.norm(read)) for read in reads):
            found[param[1]] = {held.rank for held in of_param}
    if not found:
        return []
    ranks = numbered("rank", {rank for holders in found.values() for rank in holders})
    return [
        f"the gradients of {in_short(sorted(found))} are not the same on {ranks} when optimizers read them, as those "
        "of other parameters are, and no record makes them so: of so few elements no weight is known"
    ]


def _is_few(held: Held) -> bool:
    return held.reason == TOO_FEW and not held.partial and not held.elsewhere


def _read(data: StepData, held: Held) -> np.ndarray:
    """What the optimizer read, freed of recorded clips; NaN where a rank holds no such part, or nothing was read."""
    final, track = held.replay.final(held.rank), data.tracks[held.param][held.rank]
    if final is None or not track.points:
        return np.full(track.param.num_positions, np.nan)
    return np.asarray(track.points[-1].values.data / final.clip)


def _samples(data: StepData, held: Held) -> list[tuple[Entry, np.ndarray]]:
    """What was sampled of a gradient up to what the optimizer read, in order."""
    final = held.replay.final(held.rank)
    sampled = [entry for entry in held.replay.history(held.rank) if entry.sampled]
    if final is None or not sampled or sampled[-1] is not final:
        return []
    points = data.tracks[held.param][held.rank].points[: len(sampled)]
    found = [
        (entry, point.values.data) for entry, point in zip(sampled, points, strict=False) if entry.seq == point.seq
    ]
    return found if len(found) == len(sampled) else []


def _known(data: StepData, measured: Sequence[Held], writes: Writes) -> dict[Place, list[Known]]:
    """The weights that gradients were measured to have at each place, each once."""
    found: dict[Place, list[Known]] = {}
    asked: Counter[int] = Counter()
    for held in sorted(measured, key=lambda held: -held.replay.basis.values.shape[1]):
        if held.observed is None or held.hops or asked[held.rank] == MOST_ASKED:
            continue
        asked[held.rank] += 1
        keys = tuple(held.replay.basis.keys)
        for index, (entry, _) in enumerate(_samples(data, held)):
            if entry.observed is None or entry.stderr is None or not np.isfinite(entry.observed).all():
                continue
            others = found.setdefault((entry.rank, index, entry.order), [])
            written = _written(data, held, entry, writes)
            one = Known(keys, entry.observed / written, entry.stderr / abs(written))
            if len(others) < MOST and not any(_are_alike(one, other) for other in others):
                others.append(one)
    return found


def _are_alike(one: Known, other: Known) -> bool:
    return one.keys == other.keys and np.allclose(one.weights, other.weights, rtol=SURE)


def _confirm(
    data: StepData, held: Held, known: Mapping[Place, Sequence[Known]], writes: Writes, *, last: bool = False
) -> bool:
    """Give samples that nothing is known of, or the last one alone, their weights. Whether all have some then."""
    samples = list(enumerate(_samples(data, held)))[-1 if last else 0 :]
    for index, (entry, values) in samples:
        if entry.observed is None and entry.solution is None:
            others = known.get((held.rank, index, entry.order), ())
            _give(entry, values, held, _written(data, held, entry, writes), others)
    return bool(samples) and all(entry.observed is not None for _, (entry, _) in samples)


def _give(entry: Entry, values: np.ndarray, held: Held, written: float, known: Sequence[Known]) -> None:
    """Find the weights in a sample, if any of these make it; standard errors are NaN where a contribution is zero."""
    here = np.isfinite(values)
    read, leaves = values[here], held.replay.basis.values[:, here]
    if not (np.isfinite(entry.nominal).all() and np.isfinite(leaves).all()):
        return
    keys, none = tuple(held.replay.basis.keys), np.zeros(len(leaves))
    candidates = [Known(keys, entry.nominal / written, none), Known(keys, entry.nominal, none)]
    candidates += [one for one in known if one.keys == keys]
    sizes, length = np.linalg.norm(leaves, axis=1), float(np.linalg.norm(read))
    for one in candidates:
        weights, inherited = one.weights * written, float(np.linalg.norm(one.stderr * written * sizes))
        summands = np.abs(weights) * sizes
        off = RESIDUAL_FACTOR * held.replay.epsilon * (length + float(summands.sum())) + SURE_SIGMAS * inherited
        rest = float(np.linalg.norm(read - weights @ leaves))
        if off <= SURE * length and rest <= off:
            largest, terms = max(length, float(np.linalg.norm(summands))), np.count_nonzero(summands)
            error = max(rest, ROUNDING * held.replay.epsilon * largest * terms**0.5, inherited)
            entry.observed = weights
            entry.stderr = np.divide(error, sizes, out=np.full(len(sizes), np.nan), where=sizes > 0)
            entry.own = np.nan_to_num(entry.stderr)
            return


def _written(data: StepData, held: Held, entry: Entry, writes: Writes) -> float:
    """What the program's own lines multiplied a gradient by on its rank up to a sample."""
    param = data.tracks[held.param][held.rank].param.id
    return prod(
        event.factor
        for event in writes[held.rank]
        if event.factor and event.op == SCALED and event.seq < entry.seq
        if param in data.params_of(held.rank, event.params)
    )
