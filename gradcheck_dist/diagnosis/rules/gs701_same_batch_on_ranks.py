"""Data-parallel ranks train on the same tokens in the same step.

## What it does
Compares, by a hash of the labels and by the loss and gradients that came out, what data-parallel ranks got in one
step. Ranks that share their tokens by design (tensor, context and pipeline parallelism) are one data rank and not
compared with each other, nor are those that gather unequal parts, or each take a part of what they hold alike. Passes
of which nothing is in what an optimizer reads (a held-out batch whose gradient is looked at) may be every rank's. Ranks
that nothing but their labels makes one data rank are found by what they do: each computes the whole gradient with a
copy of the whole model, nothing is exchanged among them, and their gradients are reduced together. So are ranks whose
losses have no labels, where inputs and targets are the same. The same batch in several steps is not looked at: a toy
that overfits one batch is a fine test.

## Why it matters
The weights are right and nothing is off in any norm: the run just sees 1/R of the data it pays for, with the gradient
noise of the smaller batch, and an epoch shows some documents R times.

## Example
    loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=same_seed_everywhere)

## Fix
    sampler = DistributedSampler(dataset, num_replicas=dp_size, rank=dp_rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    ...
    sampler.set_epoch(epoch)
Streaming sets: `datasets.distributed.split_dataset_by_node(dataset, dp_rank, dp_size)`. accelerate: `prepare` the
loader. Use the rank among data-parallel ranks, not the global one, where tp, cp or pp are above 1.

## References
- torch.utils.data.distributed.DistributedSampler; Hugging Face datasets, "Use with PyTorch: distributed".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.losses.returned import looked_at, weighing
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey
from gradcheck_dist.ledger.exchanges import GATHER, SLICE, SUM, passed
from gradcheck_dist.ledger.repeated_batches import batches_given, repeating
from gradcheck_dist.wording import numbered, plural

CODE = "GS701"
NAME = "same-batch-on-ranks"
_FIX = (
    "Give each data-parallel rank its own part of the data: a DistributedSampler with the data-parallel rank and size. "
    "If these ranks share a batch by design, declare the axes (--axes cp=2 of `gradcheck run`)."
)
SAME_GRADIENT = 0.1
"""Relative difference of one batch's gradients on two copies; kernels and low precision leave less."""
SAME_LOSS = 1e-4
"""Relative difference of the losses of one batch on two copies of a model; without dropout they are equal bits."""


def could_audit(facts: StepFacts) -> bool:
    known = [rank for rank in facts.data.events if batches_given(facts.data, rank)]
    return len(known) > 1 or len({one.key[0] for one in _taking_part(facts) if _tells(one)}) > 1


def audit(facts: StepFacts) -> Iterator[Remark]:
    yield from _repeated(facts)
    alike: dict[tuple[object, ...], list[Contribution]] = defaultdict(list)
    taking_part = _taking_part(facts)
    for one in filter(_tells, taking_part):
        alike[one.label_hash, one.num_tokens].append(one)
    apart = _data_place(facts)
    # A sum of activations that differ between ranks makes sense for one batch alone, whose work they divide.
    by_design = [set(one.ranks) for one in passed(facts.data.events) if one.forward in (GATHER, SLICE, SUM)]
    shared = []
    for group in alike.values():
        first = group[0]
        copies = [
            one
            for one in group
            if _same_loss(one, first)
            and _same_gradients(facts, one, first)
            and (one is first or not any({one.loss_rank, first.loss_rank} <= ranks for ranks in by_design))
        ]
        if len({apart.get(one.ranks[0], one.key[0]) for one in copies}) > 1:
            shared.append(copies)
    if not shared:
        return
    data_ranks = sorted({one.key[0] for copies in shared for one in copies})
    ranks = sorted({rank for copies in shared for one in copies for rank in one.ranks})
    repeated = sum(len(copies) - 1 for copies in shared)
    total = len(taking_part)
    first = shared[0][0]
    shown = ", ".join(f"(k={one.key[1]}, microbatch {one.key[2]})" for one in (copies[0] for copies in shared[:4]))
    more = f" and {len(shared) - 4} more" if len(shared) > 4 else ""
    yield Remark(
        answer=Answer(
            severity="warning",
            explanation=f"{numbered('Data rank', data_ranks)} were given the same tokens in this step: at "
            f"{shown}{more} labels and losses are equal. The step sees "
            f"{plural(total - repeated, 'different batch')}, not {total}.",
            fix=_FIX,
        ),
        pattern=f"{repeated} of {total} contributions are copies of another rank's",
        params=frozenset(held.param for held in facts.held),
        ranks=tuple(ranks),
        rank=first.loss_rank or 0,
        event=first.loss,
    )


def _repeated(facts: StepFacts) -> Iterator[Remark]:
    """Ranks that labels make one data rank, and that divide no work among them."""
    if _data_place(facts):
        return
    for ranks in repeating(facts.data, facts.contributions):
        place = facts.contributions.coordinate[ranks[0]]
        first = min((key, one) for key, one in facts.contributions.by_key.items() if key[0] == place)[1]
        given = "inputs and targets" if batches_given(facts.data, ranks[0]) else "tokens"
        yield Remark(
            answer=Answer(
                severity="warning",
                explanation=f"{numbered('Rank', ranks)} were given the same {given} in this step. Each computes the "
                "whole gradient with a copy of the whole model, nothing is exchanged among them, and what they compute "
                "is the same in every pass; then their gradients are reduced together.",
                fix=_FIX,
            ),
            pattern=f"{numbered('rank', ranks)} repeat one another",
            params=frozenset(held.param for held in facts.held),
            ranks=ranks,
            rank=ranks[0],
            event=first.loss,
        )


def _taking_part(facts: StepFacts) -> list[Contribution]:
    """Contributions but for those that were looked at, or of which surely nothing is in what an optimizer reads."""
    weighs, seen = weighing(facts.held)
    joined = {key for held in facts.held for key in held.replay.basis.keys}
    nowhere = (seen - weighs) | (_with_gradients(facts) - joined)
    nowhere |= looked_at(facts.data, facts.contributions, facts.held)
    return [one for key, one in facts.contributions.by_key.items() if key not in nowhere]


def _tells(one: Contribution) -> bool:
    """Whether a batch can be recognised: labels and loss were seen, and it holds tokens."""
    return one.label_hash is not None and bool(one.value) and bool(one.num_tokens)


def _with_gradients(facts: StepFacts) -> set[ContributionKey]:
    """Contributions of which some gradient was seen, of whatever parameter."""
    coordinate = facts.contributions.coordinate
    return {
        (coordinate.get(rank, rank), *slot)
        for tracks in facts.data.tracks.values()
        for rank, track in tracks.items()
        for slot in track.leaves
    }


def _same_loss(one: Contribution, other: Contribution) -> bool:
    assert one.value is not None and other.value is not None
    return abs(one.value - other.value) <= SAME_LOSS * abs(other.value)


def _same_gradients(facts: StepFacts, one: Contribution, first: Contribution) -> bool:
    """Whether most parameters got the same gradients from both, as far as they can be compared. Ranks that each compute
    one loss over the gathered features of all (CLIP) have its labels and its value in common, and no batch."""
    alike: list[bool] = []
    for tracks in facts.data.tracks.values():
        pair = [
            tracks[contribution.loss_rank].leaves.get(contribution.key[1:])
            for contribution in (one, first)
            if contribution.loss_rank in tracks
        ]
        if len(pair) == 2 and pair[0] is not None and pair[1] is not None:
            mine, other = pair[0][1].data, pair[1][1].data
            both = ~np.isnan(mine) & ~np.isnan(other)
            if scale := float(np.linalg.norm(other[both])):
                alike.append(float(np.linalg.norm(mine[both] - other[both])) <= SAME_GRADIENT * scale)
    return 2 * sum(alike) >= len(alike)


def _data_place(facts: StepFacts) -> dict[int, tuple[int, ...]]:
    """The place of each rank on the axes over which data is spread, where the mesh was declared."""
    if facts.context.mesh.rests_on != "declared":
        return {}
    axes = Axes(**facts.context.axes)
    names = ("dp_replicate", "dp_shard")
    return {rank: tuple(axes.coordinates(rank)[name] for name in names) for rank in range(facts.context.world_size)}
