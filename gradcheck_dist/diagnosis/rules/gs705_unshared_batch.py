"""Ranks that hold shards of one model are each fed a batch of their own.

## What it does
Finds groups of ranks that count tokens and reduce gradients among themselves, whose gradients would be right had the
step no tokens but the group's, and that hold different values under the same names while other parameters began alike
on all of them. They hold shards of one model, as tensor-parallel ranks do, and every rank evaluates other labels: the
shards of a layer work on activations of different texts.

## Why it matters
A layer's output is put together out of shards that saw different tokens. Nothing raises: shapes fit, every rank's loss
is a plausible number, and training goes on with gradients that belong to no batch. What is replicated over the shards
(norms, embeddings, the head) drifts apart.

## Example
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=dist.get_rank())     # with tp = 2

## Fix
    sampler = DistributedSampler(dataset, num_replicas=dp_size, rank=mesh["dp"].get_local_rank())
Seeds that draw data must not depend on the rank within a tensor-parallel group either.

## References
- Megatron-LM, megatron/core/tensor_parallel/data.py, broadcast_data: the first rank of a group reads for all.
- torchtitan, build_dataloader(dp_world_size, dp_rank).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from statistics import median

import numpy as np

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.norms.hand_norms import clipped_apart
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.expected import expected_weights
from gradcheck_dist.ledger.names import plain_name
from gradcheck_dist.ledger.tracks import Track

CODE = "GS705"
NAME = "unshared-batch"
CONSEQUENCES = frozenset({"GS000", "GS103", "GS301", "GS302", "GS303", "GS305"})
"""What such a step looks like while every rank's batch is taken for a part of one: the groups' token counts and
reductions leave out the others."""
EXCHANGES = "GS802"
"""What looks wrong behind a sum of activations with which every rank goes on to a loss of its own."""
COPIES = "GS701"
"""What the ranks of one group show that read one batch."""
Own = Mapping[ContributionKey, Fraction]
"""The weights of a group's contributions."""
SAME = 1e-3
"""Relative; weights that are right for a group's tokens alone are off by a whole factor else."""


def could_audit(facts: StepFacts) -> bool:
    return bool(_groups(facts))


def audit(facts: StepFacts) -> Iterator[Remark]:
    if not facts.found & {"GS000", "GS103"} or not facts.found <= CONSEQUENCES:
        return
    groups = _groups(facts)
    laid_out = {key for key, of_rank in facts.data.tracks.items() if _laid_out(of_rank)}
    apart_by_name = {held.param for held in facts.held if plain_name(held.param[1]) != held.param[1]}
    shards = [held for held in facts.held if held.param in laid_out | apart_by_name]
    copies = [held for held in facts.held if held.param not in laid_out | apart_by_name]
    if "GS103" not in facts.found and apart_by_name:
        return  # parts by hand that are scaled by a number need not be shards: experts over their own ranks
    if not groups or not any(_explains(facts, shards, copies, own) for own in _owns(facts, groups, apart_by_name)):
        return
    first = min(facts.contributions.by_key.values(), key=lambda one: one.key)
    names = sorted({plain_name(held.param[1]) for held in shards})
    apart_by = "different values" if not laid_out else "different parts"
    shown = in_short(names)
    apart = " | ".join(",".join(map(str, sorted(group))) for group in groups)
    swapped = _read_one_batch(facts, groups)
    labels = (
        f"ranks {apart} each read one: data follows the rank among the shards and not the data-parallel one."
        if swapped
        else "every rank evaluates other labels."
    )
    yield Remark(
        answer=Answer(
            explanation=f"Ranks {apart} each reduce gradients among themselves. Under one name they "
            f"hold {apart_by} of {shown}, as tensor-parallel shards do, while other parameters began alike on "
            f"all of them. Shards of one model work on one batch, but {labels}",
            fix="Feed ranks that hold shards of one model the same batch: give the sampler, and what seeds it, the "
            "data-parallel rank and not the global one. Where they hold no shards but heads or experts of their own, "
            "count tokens and reduce what is shared over all ranks.",
        ),
        pattern=f"ranks {apart} hold shards of one model and evaluate a batch each",
        params=frozenset(held.param for held in facts.held),
        ranks=tuple(sorted(facts.data.events)),
        rank=first.loss_rank or 0,
        event=first.loss,
        explains=lambda finding: _is_consequence(finding) or (swapped and finding.code == COPIES),
    )


def _is_consequence(finding: Finding) -> bool:
    return finding.code in CONSEQUENCES or finding.code == EXCHANGES


def _read_one_batch(facts: StepFacts, groups: list[frozenset[int]]) -> bool:
    """Whether all ranks of each group, which hold the same shards, have the same labels in every pass."""
    place = facts.contributions.coordinate
    labels: dict[int, dict[tuple[int, int], int | None]] = defaultdict(dict)
    for (data_rank, *slot), one in facts.contributions.by_key.items():
        labels[data_rank][slot[0], slot[1]] = one.label_hash
    return all(labels[place[rank]] == labels[place[min(group)]] for group in groups for rank in group)


def _groups(facts: StepFacts) -> list[frozenset[int]]:
    """The groups of ranks that hold the same shards, where all parameters that are sharded by hand or as DTensors tell
    the same ones, each rank has tokens of its own, and no activations are exchanged by all-to-all, as for experts; else
    []."""
    parts: dict[tuple[int, str], set[frozenset[int]]] = defaultdict(set)
    for (stage, name), of_rank in facts.data.tracks.items():
        laid_out = _laid_out(of_rank)
        if plain_name(name) != name or laid_out:
            parts[stage, plain_name(name)] |= laid_out or {frozenset(of_rank)}
            if any(track.exchanges for track in of_rank.values()):
                return []
    told = {frozenset(found) for found in parts.values()}
    place, labels = facts.contributions.coordinate, [one.label_hash for one in facts.contributions.by_key.values()]
    if len(told) != 1 or None in labels or len(set(place.values())) < len(facts.data.events):
        return []
    groups = sorted(next(iter(told)), key=min)
    return groups if len(groups) > 1 and frozenset().union(*groups) == frozenset(facts.data.events) else []


def _laid_out(of_rank: dict[int, Track]) -> set[frozenset[int]]:
    """The ranks that hold each part of a parameter whose gradients arrive in parts, as those of a DTensor do and FSDP's
    do not; nothing where they arrive whole."""
    found: dict[bytes, set[int]] = defaultdict(set)
    for rank, track in of_rank.items():
        for _, leaf in list(track.leaves.values())[:1]:
            found[np.isfinite(leaf.data).tobytes()].add(rank)
    return {frozenset(ranks) for ranks in found.values()} if len(found) > 1 else set()


def _owns(facts: StepFacts, groups: list[frozenset[int]], by_name: Collection[object]) -> Iterator[dict[int, Own]]:
    """What contributions should weigh on each rank were those of its group the only ones; also, where the parts are
    DTensors', which nothing else explains, were tokens counted over all ranks, and divided by the groups or not."""
    yield {rank: _own_weights(facts, group) for group in groups for rank in group}
    if not by_name:
        place = facts.contributions.coordinate
        for times in (len(groups), 1):
            weights = {key: times * weight for key, weight in _own_weights(facts, frozenset().union(*groups)).items()}
            of_group = [{place[rank] for rank in group} for group in groups]
            yield {
                rank: {key: weight for key, weight in weights.items() if key[0] in places}
                for group, places in zip(groups, of_group, strict=True)
                for rank in group
            }


def _explains(facts: StepFacts, shards: list[Held], copies: list[Held], own: dict[int, Own]) -> bool:
    """Whether all weights are right so; copies may be reduced over all ranks."""
    clips = _clips(facts, shards, own)
    return all(_right_alone(held, own[held.rank], clips[held.rank]) for held in shards) and all(
        _right_alone(held, own[held.rank], clips[held.rank]) or _reaches_all(held, own[held.rank]) for held in copies
    )


def _own_weights(facts: StepFacts, group: frozenset[int]) -> Own:
    """What contributions should weigh were the group's the only ones."""
    place = {facts.contributions.coordinate[rank] for rank in group}
    counts = {key: c.num_tokens for key, c in facts.contributions.by_key.items() if key[0] in place and c.num_tokens}
    return expected_weights(facts.context.objective, counts) if counts else {}


def _clips(facts: StepFacts, shards: Iterable[Held], own: Mapping[int, Own]) -> dict[int, float]:
    """What each rank's clip by hand multiplied by: copies that differ have other norms, so it tells another number than
    on the ranks of other groups. 1 where nothing of that kind is sure."""
    found: dict[int, list[float]] = defaultdict(list)
    for held in shards:
        mine = own[held.rank]
        found[held.rank] += [cell.observed / float(mine[cell.key]) for cell in held.cells if cell.key in mine]
    clips = {rank: median(ratios or [1.0]) for rank, ratios in found.items()}  # a batch may have no labels
    # Of what was freed of such a clip already, a constant before it is not known.
    freed = facts.by_norm is not None and facts.by_norm.of_copies
    sure = clips.keys() == own.keys() and (freed or clipped_apart(clips, facts.data, facts.norms))
    return clips if sure else dict.fromkeys(own, 1.0)


def _right_alone(held: Held, own: Own, clip: float) -> bool:
    mine = [cell for cell in held.cells if cell.key in own]
    return all(_weighs(cell, clip * float(own[cell.key])) for cell in mine) and not _reaches_all(held, own)


def _weighs(cell: Cell, expected: float) -> bool:
    return abs(cell.observed / expected - 1) <= max(SAME, 2 * cell.tolerance)


def _reaches_all(held: Held, own: Own) -> bool:
    """Whether other groups' contributions come to a gradient: it is reduced over all ranks."""
    return any(abs(cell.ratio) > max(SAME, cell.margin) for cell in held.cells if cell.key not in own)
