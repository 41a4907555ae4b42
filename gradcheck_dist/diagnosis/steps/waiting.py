"""Gradients that wait for an optimizer which steps less often than others, or in turn with them.

Parameter groups may have optimizers with periods of their own (nerfstudio accumulates three passes for one group, and
steps another in each). A step ends where the first of them steps, so what the others read holds passes of several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Backward, OptimizerStep, ZeroGrad
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import numbered

SELDOM = "whose optimizer did not step there"

Copy = tuple[ParamKey, int]
"""A parameter on a rank."""


@dataclass
class Unread:
    """Whose passes of a step were still unread, and not emptied, when it was over; what was read or emptied in it,
    before its first pass, or at all. `made`: parameters of which a pass made a gradient that is not zero; `read`: those
    that an optimizer held which stepped, with the other copies of tied ones."""

    left: set[Copy] = field(default_factory=set)
    cleared_before: set[Copy] = field(default_factory=set)
    cleared: set[Copy] = field(default_factory=set)
    made: set[ParamKey] = field(default_factory=set)
    read: set[ParamKey] = field(default_factory=set)


def unread_in(data: StepData) -> Unread:
    """What a step leaves to a later one."""
    result = Unread()
    for rank, events in data.events.items():
        keys = {of_key[rank].param.id: key for key, of_key in data.tracks.items() if rank in of_key}
        passed = False
        for event in events:
            if not isinstance(event, Backward | OptimizerStep | ZeroGrad) or event.params is None:
                continue
            found = {(keys[param], rank) for param in data.params_of(rank, event.params) if param in keys}
            if isinstance(event, Backward):
                passed = True
                result.left |= found
            else:
                result.left -= found
                result.cleared |= found
                result.read |= {key for key, _ in found} if isinstance(event, OptimizerStep) else set()
                result.cleared_before |= set() if passed else found
    result.read |= {copy for copy, other in data.beside.items() if other in result.read}
    result.made = {
        key
        for key, of_rank in data.tracks.items()
        if any(np.nan_to_num(values.data).any() for track in of_rank.values() for _, values in track.leaves.values())
    }
    return result


def name_waiting(steps: Sequence[tuple[int, Unread, Sequence[Held]]], lost: str) -> None:
    """Say of each gradient that is no combination of its step's contributions (`lost` stands in the reason) which
    earlier steps' passes it holds as well: some that no optimizer had read, and nobody had emptied."""
    waiting: dict[Copy, set[int]] = defaultdict(set)
    for step, unread, judged in steps:
        for copy in unread.cleared_before:
            waiting.pop(copy, None)
        for held in judged:
            of = sorted(set[int]().union(*(waiting.get((held.param, rank), ()) for rank in held.ranks)))
            if lost in held.reason and of:
                held.changed_in = (
                    f"it holds the passes of {numbered('step', of)} as well, which no optimizer had read, being of a "
                    f"parameter {SELDOM}: what it should be a mean over is not judged"
                )
        for copy in unread.cleared:
            waiting.pop(copy, None)
        for copy in unread.left:
            waiting[copy].add(step)
