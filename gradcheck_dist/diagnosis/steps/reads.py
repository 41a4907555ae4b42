"""What optimizers read in a step, kept for the next one: a buffer that nobody emptied holds it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from gradcheck_dist.diagnosis.steps.changed_in import NO_COMBINATION
from gradcheck_dist.diagnosis.steps.waiting import Copy
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import OptimizerStep
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import StepData

MOST_VALUES = 8192
"""Values of a step that are kept for the next one, over all parameters and ranks."""


@dataclass(frozen=True)
class Read:
    """What an optimizer read of a parameter on a rank, freed of the clip that was recorded, shape (num_positions,), NaN
    where nothing is sampled. `right`: what it should have read, None where that is not known, or was read. `passes`:
    what this step's passes brought, shape (num_columns, num_positions). `left`: what was there before the first of
    them, shape (num_positions,), None where nothing was, or it is part of nothing that was read."""

    values: np.ndarray
    right: np.ndarray | None
    clip: float
    epsilon: float
    event: OptimizerStep
    passes: np.ndarray
    left: np.ndarray | None


def reads_of(
    data: StepData, held: Sequence[Held], contributions: Contributions, expected: Mapping[ContributionKey, Fraction]
) -> dict[Copy, Read]:
    """What optimizers read in a step, of as many parameters as are kept: the same in every step."""
    result: dict[Copy, Read] = {}
    kept = 0
    for one in sorted(held, key=lambda one: (one.param, one.rank)):
        track = data.tracks[one.param][one.rank]
        last = track.points[-1] if track.points else None
        event = data.event_of[one.rank].get(last.seq) if last is not None else None
        if last is None or not isinstance(event, OptimizerStep) or last.values.partial:
            continue
        kept += int(np.isfinite(last.values.data).sum())
        if kept > MOST_VALUES:
            break
        final = one.replay.final(one.rank)
        clip = final.clip if final is not None else 1.0
        right = _right(one, contributions, expected) if NO_COMBINATION in one.reason else None
        is_left = final is not None and final.leftover and one.rank not in one.replay.waited
        result[one.param, one.rank] = Read(
            last.values.data / clip,
            right,
            clip,
            one.replay.epsilon,
            event,
            one.replay.basis.values,
            track.points[0].values.data if is_left else None,
        )
    return result


def _right(held: Held, contributions: Contributions, expected: Mapping[ContributionKey, Fraction]) -> np.ndarray | None:
    """The gradient that is asked for, at the sampled positions; None where a pass's gradient came in several parts, or
    its loss is not known."""
    basis = held.replay.basis
    total = np.zeros(basis.values.shape[1])
    mine = [column for column, seen in enumerate(held.visible) if seen]
    keys = [basis.keys[column] for column in mine]
    if len(set(keys)) < len(keys):
        return None
    for column, key in zip(mine, keys, strict=True):
        contribution = contributions.by_key.get(key)
        if contribution is None or not contribution.weight or key not in expected:
            return None
        total = total + float(expected[key]) / contribution.weight * basis.values[column]
    return total
