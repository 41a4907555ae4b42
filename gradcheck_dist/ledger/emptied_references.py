"""Passes through the model itself with all that the step is given, whose gradients are kept aside and emptied.

The other way to have a reference (ledger/references.py): one rank, or each, differentiates all ranks' tokens, clones
the gradients and empties `.grad` before the step's own passes. Lost passes look like that, but their gradients are
those of each rank's own batches. Of one process nothing but the gradient tells: that of the same tokens has its
direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile

import numpy as np

from gradcheck_dist.events import Backward, OptimizerStep, ZeroGrad
from gradcheck_dist.ledger.counted_losses import count, losses_by_pass, total
from gradcheck_dist.ledger.tracks import Slot, StepData, step_data
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run

ALIKE = 1e-3
"""Relative difference of the gradients of the same tokens, which may come in other microbatches."""
Slots = Mapping[int, frozenset[Slot]]
"""By rank"""


def emptied_references(run: Run, step: int, perhaps: Slots) -> dict[int, frozenset[Slot]]:
    """Of the passes of each rank of which `perhaps` nothing was left, those that are such: as many as come first."""
    if not any(perhaps.values()):
        return {}
    every = {rank: _slots(trace, step) for rank, trace in run.ranks.items()}
    first = {rank: list(takewhile(perhaps.get(rank, frozenset()).__contains__, slots)) for rank, slots in every.items()}
    counts = {rank: _counts(run, step, rank, slots) for rank, slots in every.items()}
    for num in range(max(map(len, first.values()), default=0), 0, -1):
        chosen = {rank: frozenset(slots[:num]) for rank, slots in first.items() if len(slots) >= num}
        rest = {rank: frozenset(slots) - chosen.get(rank, frozenset()) for rank, slots in every.items()}
        whole = total(counts[rank][slot] for rank, slots in rest.items() for slot in slots)
        given = {total(counts[rank][slot] for slot in slots) for rank, slots in chosen.items()}
        if whole is not None and given == {whole} and all(rest.values()) and _tells(step_data(run, step), chosen, rest):
            return chosen
    return {}


def _counts(run: Run, step: int, rank: int, slots: Iterable[Slot]) -> dict[Slot, int | None]:
    by_pass = losses_by_pass(run, step, rank)
    return {slot: count(by_pass.get(slot, ())) for slot in slots}


def _tells(data: StepData, first: Slots, rest: Slots) -> bool:
    """Whether these passes' gradients are those of what the others have on all ranks, as far as gradients tell."""
    return _alike(data, first) and not _alike(data, rest) if len(data.events) > 1 else _parallel(data, first, rest)


def _slots(trace: RankTrace, step: int) -> list[Slot]:
    """A rank's passes in order."""
    passes = [one for one in trace.events if isinstance(one, Backward) and one.step == step and one.params is not None]
    in_order = sorted(passes, key=lambda one: one.seq)
    return list(dict.fromkeys((one.accumulation_step, one.microbatch) for one in in_order))


def before_emptied(trace: RankTrace, step: int) -> frozenset[Slot]:
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
