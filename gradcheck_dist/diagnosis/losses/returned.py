"""Passes whose gradients were handed to the caller, and nothing of which is in the gradient that the optimizer reads.

First-order MAML takes an inner step with them, an adversary or a line search looks at them. They are no contributions.
Where some of a line's passes weigh something, the rest of them were lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import SIGMAS, Held
from gradcheck_dist.events import Backward
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import Slot, StepData

NOTHING = 1e-6
"""Transfers below this are none: float32 rounding leaves some 1e-8."""
TELLS = 0.5
"""Of the weight that is documented: noise below it tells nothing from that weight."""
MOST = 0.5
"""Of a line's passes: how many have to be measured."""
Line = tuple[str, int]


def looked_at(data: StepData, contributions: Contributions, measured: Iterable[Held]) -> set[ContributionKey]:
    """Contributions of lines whose gradients were all returned and weigh nothing in any parameter; none where that is
    true of all. A line's passes are alike, so where most were measured, the rest may be what an accumulated gradient is
    the sum of (the last layer's, looked at for each loss of a pass), which no measurement tells from it. Where nothing
    at all is told apart (a gradient on all ranks' batches, to compare with), it is as torch documents it."""
    found, _ = _looked_at(data, contributions, measured)
    return found if len(found) < len(contributions.by_key) else set()


def looked_at_alone(
    data: StepData, contributions: Contributions, measured: Iterable[Held]
) -> frozenset[tuple[int, Slot]]:
    """Such passes, by rank, where they are all that count tokens on some rank, and others that count none train: a
    held-out batch of another loss."""
    found, weighs = _looked_at(data, contributions, measured)
    every, train = {key[0] for key in contributions.by_key.keys() - found}, {key[0] for key in weighs}
    alone = {key for key in found if key[0] in train and key[0] not in every}
    coordinate = contributions.coordinate
    return frozenset((rank, key[1:]) for rank in data.events for key in alone if coordinate.get(rank, rank) == key[0])


def _looked_at(
    data: StepData, contributions: Contributions, measured: Iterable[Held]
) -> tuple[set[ContributionKey], set[ContributionKey]]:
    """Contributions that were looked at, and passes that weigh something."""
    lines: dict[Line, set[ContributionKey]] = defaultdict(set)
    accumulated: set[ContributionKey] = set()
    for rank, events in data.events.items():
        for event in events:
            if isinstance(event, Backward):
                key = (contributions.coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
                if event.returned and event.site is not None:
                    lines[event.site.file, event.site.line].add(key)
                else:
                    accumulated.add(key)
    if not lines:
        return set(), set()
    measured = [held for held in measured if held.observed is not None]
    weighs, measured_keys = weighing(measured)
    if measured and all(np.isnan(held.observed).all() for held in measured if held.observed is not None):
        weighs, measured_keys = set(), {key for keys in lines.values() for key in keys}
    found = {
        key
        for keys in lines.values()
        if len(keys & measured_keys) > MOST * len(keys) and not keys & (weighs | accumulated)
        for key in keys
        if key in contributions.by_key
    }
    return found, weighs


def weighing(measured: Iterable[Held]) -> tuple[set[ContributionKey], set[ContributionKey]]:
    """Contributions with a weight in some parameter; and those whose weights were measured well enough in one to tell
    what is documented from nothing."""
    weighs: set[ContributionKey] = set()
    seen: set[ContributionKey] = set()
    for held in measured:
        if held.observed is None or held.stderr is None:
            continue
        largest = max((abs(value) for value in held.observed.tolist() if np.isfinite(value)), default=0.0)
        for column, key in enumerate(held.replay.basis.keys):
            value, error = float(held.observed[column]), float(held.stderr[column])
            documented = abs(float(held.nominal[column])) if held.nominal is not None else 0.0
            if SIGMAS * error <= TELLS * (documented or largest):
                seen.add(key)
            if not abs(value) <= max(NOTHING * largest, SIGMAS * error):
                weighs.add(key)
    return weighs, seen


def arrived(measured: Iterable[Held]) -> set[ContributionKey]:
    """Contributions of which something is surely in some gradient; no weight that was not measured tells."""
    found: set[ContributionKey] = set()
    for held in measured:
        if held.observed is None or held.stderr is None:
            continue
        finite = held.observed[np.isfinite(held.observed)]
        least = np.maximum(NOTHING * np.abs(finite).max(initial=0.0), SIGMAS * held.stderr)
        found |= {
            key for key, there in zip(held.replay.basis.keys, np.abs(held.observed) > least, strict=True) if there
        }
    return found


def perhaps_gone(
    measured: Sequence[Held], data: StepData, contributions: Contributions
) -> dict[int, frozenset[tuple[int, int]]]:
    """By rank, the passes of which surely nothing is in any gradient, or of which it is not known: those of one batch
    are not told from one another."""
    every = {key for held in measured for key in held.replay.basis.keys}
    slots: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for coordinate, k, m in every - arrived(measured):
        slots[coordinate].add((k, m))
    return {rank: frozenset(slots[contributions.coordinate.get(rank, rank)]) for rank in data.events}
