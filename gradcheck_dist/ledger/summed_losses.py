"""Ranks of one batch that train on the sum of all their losses.

Ranks that divide the work on one batch (experts, tensor-parallel shards) may take its loss for one, as Megatron-LM
does: backward hands on what arrives at a sum of activations. Or each has the loss for itself, and what is trained on is
the sum of all: then backward through each exchange of activations is its transpose for ranks that go on differently
(`torch.distributed.nn.functional` is so), it gives the sum of what arrived though that is whole on each rank, and the
gradient of a copy is the sum over the ranks. Each such rank stands for a batch of its own then, as a peer of a
data-parallel reduction does: every weight is what it is of that sum.
"""

from __future__ import annotations

from collections import defaultdict

from gradcheck_dist.events import Exchange
from gradcheck_dist.ledger.exchanges import GATHER, MOVE, SCATTER, SUM, SWAP, Passed, passed
from gradcheck_dist.ledger.repeated_batches import reduced_over, same_gradients
from gradcheck_dist.ledger.strangers import copies
from gradcheck_dist.ledger.tracks import StepData

NEAR = 1e-3
"""Relative distance from a whole number of what a gradient was multiplied by."""


def summed_losses(data: StepData, *, perhaps: bool = False) -> dict[int, frozenset[int]]:
    """For each rank those, itself included, with which it trains on the sum of their losses; only ranks that do so with
    others are named. `perhaps`: also where no sum of copies' gradients says so, but backward through all exchanges is
    the transpose for such losses alone."""
    found: dict[int, frozenset[int]] = {}
    recorded: dict[tuple[int, ...], int] = defaultdict(int)
    for rank, events in data.events.items():
        for event in events:
            if isinstance(event, Exchange) and len(event.group) > 1 and rank == min(event.group):
                recorded[event.group] += 1
    read: dict[tuple[int, ...], list[Passed]] = defaultdict(list)
    for one in passed(data.events):
        read[one.first.group].append(one)
    for group, exchanges in read.items():
        # What is not known to be a transpose, in any group that has two of the ranks, may be another convention.
        beside = [other for other in recorded if len({*other} & {*group}) > 1]
        if any(len(read[other]) < recorded[other] or not all(map(_is_transpose, read[other])) for other in beside):
            continue
        if any(map(_sums_whole, exchanges)) and (perhaps or _adds_up_copies(data, group)):
            found |= {rank: found.get(rank, frozenset()) | {*group} for rank in group}
    return found


def _sums_whole(one: Passed) -> bool:
    """Whether backward sums gradients that are whole on each rank."""
    return one.whole and one.outcome == "scaled" and abs(one.factor / len(one.ranks) - 1) <= NEAR


def _is_transpose(one: Passed) -> bool:
    """Whether an exchange's backward is its transpose where each rank has a loss of its own."""
    if one.forward in (SUM, GATHER):
        return _sums_whole(one) or (one.outcome == "right" and not one.whole)
    return one.forward in (SCATTER, SWAP, MOVE) and one.outcome == "right"


def _adds_up_copies(data: StepData, group: tuple[int, ...]) -> bool:
    """Whether most parameters of which all ranks of a group have one gradient are reduced over them, as those of losses
    of their own have to be, and those of one loss never are."""
    first, *others = group
    reduced = set.intersection(*(reduced_over(data, first, other) for other in others))
    alike = [
        of_rank[first].param.id in reduced
        for of_rank in data.tracks.values()
        if all(copies(of_rank, first, other) and same_gradients(of_rank[first], of_rank[other]) for other in others)
    ]
    return 2 * sum(alike) > len(alike)
