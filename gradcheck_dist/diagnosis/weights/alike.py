"""Ranks that came out alike: in a large world one of them stands for the others while causes are looked for.

Every rank of a reduction holds the same combination of all ranks' contributions, so of R ranks there are R * R weights
for each parameter and accumulation step. All of them are measured; those that agree are looked at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import MATERIAL, SIGMAS, Held
from gradcheck_dist.events import Event
from gradcheck_dist.ledger.tracks import ParamKey, StepData

MOST_WEIGHTS = 20_000
"""Weights of one step that are looked at one by one, in some seconds."""
LEAST = 2
"""Holders of a parameter that stay, however many there are."""


def most_holders(data: StepData) -> int | None:
    """Of how many ranks that came out alike a parameter keeps the weights; None where all are kept."""
    sizes = [(len(tracks), sum(len(track.leaves) for track in tracks.values())) for tracks in data.tracks.values()]
    num_weights = sum(holders * columns for holders, columns in sizes)
    if num_weights <= MOST_WEIGHTS:
        return None
    return max(LEAST, MOST_WEIGHTS // max(sum(columns for _, columns in sizes), 1))


def without_repeats(measured: list[Held], data: StepData) -> list[Held]:
    """What was measured, in a large world without the ranks for which others stand (`Held.alike`)."""
    most = most_holders(data)
    if most is None:
        return measured
    of_param: dict[ParamKey, list[Held]] = defaultdict(list)
    for held in measured:
        of_param[held.param].append(held)
    return [held for holders in of_param.values() for held in _stand_for_others(holders, most)]


def _stand_for_others(of_param: list[Held], most: int) -> list[Held]:
    """The holders of one parameter without those that came out like `most` earlier ones."""
    classes: dict[tuple[object, ...], list[list[Held]]] = defaultdict(list)
    for held in of_param:
        known = classes[_way(held)]
        members = next((members for members in known if _alike(members[0], held)), None)
        if members is None:
            known.append([held])
        else:
            members.append(held)
    kept: list[Held] = []
    for members in (members for known in classes.values() for members in known):
        others = tuple(held.rank for held in members[most:])
        kept += [replace(members[0], alike=others), *members[1:most]]
    return sorted(kept, key=lambda held: held.rank)


def _way(held: Held) -> tuple[object, ...]:
    """What was done to a gradient, by which lines: the same on ranks that run the same program."""
    events = (entry.event for entry in held.replay.history(held.rank))
    return (
        held.reason,
        held.partial,
        held.elsewhere,
        held.clip_by_hand,
        *[(type(event), _line(event)) for event in events if event is not None],
    )


def _line(event: Event) -> object:
    return event.site.short if event.site is not None else None


def _alike(one: Held, other: Held) -> bool:
    if one.hops or other.hops or one.visible != other.visible:
        return False
    nothing = np.zeros(len(one.visible))
    noise = SIGMAS * np.hypot(
        *(nothing if held.stderr is None else np.nan_to_num(held.stderr) for held in (one, other))
    )
    return _equal(one.nominal, other.nominal, nothing) and _equal(one.observed, other.observed, noise)


def _equal(mine: np.ndarray | None, theirs: np.ndarray | None, noise: np.ndarray) -> bool:
    """Whether two ranks' transfers are the same, as far as they are known, which must be equally far."""
    if mine is None or theirs is None:
        return mine is theirs
    if (np.isnan(mine) != np.isnan(theirs)).any():
        return False
    return bool((np.nan_to_num(np.abs(mine - theirs)) <= noise + MATERIAL * np.nan_to_num(np.abs(mine))).all())
