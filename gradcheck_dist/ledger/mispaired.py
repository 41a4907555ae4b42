"""Losses that were evaluated on the labels of another pass than the one whose tokens the model read.

Labels of a language model are found again among the tokens of their own pass. Where a pipeline's first stage looked
these up, activations tell which pass that was: what it sent is what the next stage was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import comb
from typing import NamedTuple

import numpy as np

from gradcheck_dist.events import LossGradient, StageGradient, Tokens
from gradcheck_dist.ledger.misplaced import same_forward
from gradcheck_dist.ledger.tracks import Slot, StepData
from gradcheck_dist.trace.token_runs import found_in

FOUND = 0.25
"""Share of a pass's labels that is found where they belong: runs across the ends of rows are in none."""
TIMES_RARER = 4
"""What a language repeats is found anywhere, so much less often."""
SELDOM = 1e-5
"""Of few words any run is found by chance, here more often than there; in one of so many steps it may be."""

Place = tuple[int, Slot]


class Mispaired(NamedTuple):
    """The pass of a loss, by rank, where the tokens came from that led there, and those that its labels are of."""

    loss: Place
    read: Place
    meant: Place


def mispaired(data: StepData, coordinate: Mapping[int, int]) -> list[Mispaired]:
    """Losses whose labels are hardly found in the tokens of their own pass, and are in those of another. Ranks of one
    data `coordinate` have one batch: where the embedding is parted, each looks up the words of its own part alone."""
    tokens: dict[Place, list[np.ndarray]] = defaultdict(list)
    labels: dict[tuple[int, int], np.ndarray] = {}
    passes: dict[tuple[int, int], Slot] = {}
    edges: dict[str, dict[Place, list[StageGradient]]] = {"input": defaultdict(list), "output": defaultdict(list)}
    for rank, events in data.events.items():
        for event in events:
            if isinstance(event, Tokens):
                values = np.frombuffer(event.values, np.int64)
                if event.loss_id is None:
                    tokens[rank, (event.accumulation_step, event.microbatch)].append(values)
                else:
                    labels[rank, event.loss_id] = values
            elif isinstance(event, LossGradient):
                passes[rank, event.loss_id] = (event.accumulation_step, event.microbatch)
            elif isinstance(event, StageGradient) and event.side in edges:
                edges[event.side][rank, (event.accumulation_step, event.microbatch)].append(event)
    found = []
    for (rank, loss_id), slot in sorted(passes.items()):
        if (rank, loss_id) in labels and len(tokens) > 1:
            batch = [other for other in data.events if coordinate.get(other, other) == coordinate.get(rank, rank)]
            own = _led_from([(other, slot) for other in (rank, *batch)], edges)
            one = _mispaired((rank, slot), labels[rank, loss_id], tokens, own, len(passes))
            if one is not None:
                found.append(one)
    return found


def _mispaired(
    place: Place,
    labels: np.ndarray,
    tokens: dict[Place, list[np.ndarray]],
    led_from: list[Place],
    num_losses: int,
) -> Mispaired | None:
    own = [at for at in led_from if at in tokens]
    found = {at: [one for values in tokens[at] if (one := found_in(labels, values))[1]] for at in tokens}
    mine = [one for at in own for one in found[at]]
    others = [(*one, at) for at in tokens if at not in own for one in found[at]]
    if not mine or not others:
        return None
    here, there = max(mine, key=_share), max(others, key=lambda one: _share(one[:2]))
    if _share(there[:2]) < max(FOUND, TIMES_RARER * _share(here)):
        return None
    chance = _chance(here, there[:2]) * len(others) * num_losses
    return Mispaired(place, own[0], there[2]) if chance < SELDOM else None


def _share(found: tuple[int, int]) -> float:
    return found[0] / found[1]


def _chance(here: tuple[int, int], there: tuple[int, int]) -> float:
    """How often so few of the runs that are found in either place would be found here, were they spread at random
    (Fisher's exact test)."""
    total, hits = here[1] + there[1], here[0] + there[0]
    ways = sum(comb(here[1], num) * comb(there[1], hits - num) for num in range(here[0] + 1))
    return ways / comb(total, hits)


def _led_from(places: list[Place], edges: dict[str, dict[Place, list[StageGradient]]]) -> list[Place]:
    """Passes, and those on other stages whose activations led there, the nearest first."""
    found = list(dict.fromkeys(places))
    for at in found:
        for given in edges["input"].get(at, ()):
            found += [
                other
                for other, ends in edges["output"].items()
                if other not in found and other[0] != at[0] and any(same_forward(given, end) for end in ends)
            ]
    return found
