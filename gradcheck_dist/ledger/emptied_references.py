"""Passes through the model itself with all that the step is given, whose gradients are kept aside and emptied.

The other way to have a reference (ledger/references.py): one rank, or each, differentiates all ranks' tokens, clones
the gradients and calls `zero_grad` before the step's own passes. Lost passes look like that, but their gradients are
those of each rank's own batches. Of one process nothing but the gradient tells: that of the same tokens has its
direction.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradcheck_dist.events import Backward, OptimizerStep, ZeroGrad
from gradcheck_dist.ledger.counted_losses import count, losses_in
from gradcheck_dist.ledger.tracks import Slot, StepData, step_data
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run

ALIKE = 1e-3
"""Relative difference of the gradients of the same tokens, which may come in other microbatches."""
Slots = Mapping[int, frozenset[Slot]]
"""By rank"""


def emptied_references(run: Run, step: int) -> dict[int, frozenset[Slot]]:
    """The passes of each rank that are such; none where other ranks' show nothing of it."""
    first = {rank: _before_emptied(trace, step) for rank, trace in run.ranks.items()}
    first = {rank: slots for rank, slots in first.items() if slots}
    if not first:
        return {}
    every = {rank: _slots(trace, step) for rank, trace in run.ranks.items()}
    rest = {rank: slots - first.get(rank, frozenset()) for rank, slots in every.items()}
    whole = count(one for rank, slots in rest.items() for one in losses_in(run, step, rank, slots))
    if whole is None or not all(rest.values()):
        return {}
    if any(count(losses_in(run, step, rank, slots)) != whole for rank, slots in first.items()):
        return {}
    data = step_data(run, step)
    alike = _alike(data, first) and not _alike(data, rest) if len(run.ranks) > 1 else _parallel(data, first, rest)
    return first if alike else {}


def _slots(trace: RankTrace, step: int) -> frozenset[Slot]:
    return frozenset(
        (event.accumulation_step, event.microbatch)
        for event in trace.events
        if isinstance(event, Backward) and event.step == step and event.params is not None
    )


def _before_emptied(trace: RankTrace, step: int) -> frozenset[Slot]:
    """The passes of which an optimizer's or module's zero_grad leaves nothing, before others come."""
    slots: list[tuple[Slot, set[int]]] = []
    found: frozenset[Slot] = frozenset()
    for event in sorted((one for one in trace.events if one.step == step), key=lambda one: one.seq):
        if isinstance(event, Backward) and event.params is not None:
            reached = set(trace.param_sets.get(event.params, ()))
            slots.append(((event.accumulation_step, event.microbatch), reached))
        elif isinstance(event, ZeroGrad):
            emptied = set(trace.param_sets.get(event.params, ()))
            if slots and all(reached <= emptied for _, reached in slots):
                found = frozenset(slot for slot, _ in slots)
        elif isinstance(event, OptimizerStep):
            break
    return found if len(found) < len(slots) else frozenset()


def _sums(data: StepData, passes: Slots) -> dict[int, np.ndarray]:
    """The sum of these passes' gradients on each rank, all parameters one behind the other; NaN where none is held."""
    found: dict[int, list[np.ndarray]] = {rank: [] for rank in passes}
    for _, of_rank in sorted(data.tracks.items()):
        for rank, track in of_rank.items():
            if rank in passes:
                leaves = [values.data for slot, (_, values) in track.leaves.items() if slot in passes[rank]]
                found[rank].append(np.sum(leaves, axis=0) if leaves else np.full(track.param.num_positions, np.nan))
    return {rank: np.concatenate(of_rank) for rank, of_rank in found.items() if of_rank}


def _alike(data: StepData, passes: Slots) -> bool:
    """Whether the same came of these passes on all ranks that have them."""
    one, *others = _sums(data, passes).values()
    return all(one.shape == other.shape and _near(one, other) for other in others)


def _near(one: np.ndarray, other: np.ndarray) -> bool:
    both = ~np.isnan(one) & ~np.isnan(other)
    return bool(np.linalg.norm((one - other)[both]) <= ALIKE * np.linalg.norm(one[both]))


def _parallel(data: StepData, first: Slots, rest: Slots) -> bool:
    """Whether both gradients have one direction."""
    (mine,), (other,) = _sums(data, first).values(), _sums(data, rest).values()
    both = ~np.isnan(mine) & ~np.isnan(other)
    square = float(other[both] @ other[both])
    return square > 0 and _near(mine, other * (float(mine[both] @ other[both]) / square))
