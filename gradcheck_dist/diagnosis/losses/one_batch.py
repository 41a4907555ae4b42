"""Passes of a loop that all evaluate one batch: parts of a network (once-for-all), an adversary's steps, views.

Their losses add up by design, or lack a division by their number: both leave the same weights. Microbatches of an
accumulation have labels of their own, so labels tell passes of one batch apart from these, where other steps have other
ones: a sampler may draw the same classes in every batch (diagnosis/steps/alternatives.py looks). Where some losses have
soft targets, what the first module is given tells instead, and where none counts anything, that or the targets. A batch
that a short test repeats in all passes gives one value and one gradient there as well, and is accumulated. So are the
samples of one evaluation that go backward one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from gradcheck_dist.diagnosis.losses.parts import have_one_value, have_other_gradients
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions
from gradcheck_dist.ledger.discarded import tell_batches
from gradcheck_dist.ledger.tracks import Slot, StepData

Tell = Callable[[Contribution], object]
"""What may tell the batch of a pass; None where it is not known."""


def _labels(one: Contribution) -> object:
    return (one.label_hash, one.num_tokens) if tell_batches(one) else None


def _inputs(one: Contribution) -> object:
    return one.given


def _targets(one: Contribution) -> object:
    return one.loss.targets_hash if one.loss is not None else None


def may_be_one_batch(data: StepData, contributions: Contributions) -> bool:
    """Whether all passes of a step that count tokens, or all where none does, have one batch, so far as this step
    tells."""
    return bool(passes_of_one_batch(data, contributions))


def are_of_one_batch(steps: Sequence[Contributions]) -> list[bool]:
    """Of each step whether what its passes have in common is another thing in every one of these steps."""
    unlike = {
        tell
        for tell in (_labels, _inputs, _targets)
        if len({frozenset(map(tell, one.by_key.values())) for one in steps}) == len(steps) > 1
    }
    return [not unlike.isdisjoint(_told_by(_by_rank(one).values())) for one in steps]


def passes_of_one_batch(data: StepData, contributions: Contributions) -> list[list[ContributionKey]]:
    """The contributions of each pass, in the order of passes, where all passes of every data rank evaluate the same
    batch, to other values or gradients; [] where it is not so."""
    of_ranks = _by_rank(contributions)
    passes: dict[Slot, list[ContributionKey]] = defaultdict(list)
    for of_rank in of_ranks.values():
        for key in of_rank:
            passes[key[1:]].append(key)
    as_many = len(passes) > 1 and all(len(keys) == len(of_ranks) for keys in passes.values())
    again = as_many and _told_by(of_ranks.values()) and all(
        _are_evaluations(data, contributions, of_rank) for of_rank in of_ranks.values()
    )  # fmt: skip
    return list(passes.values()) if again else []


def _by_rank(contributions: Contributions) -> dict[int, dict[ContributionKey, Contribution]]:
    """Those that count tokens, or all where none is known to, by data rank."""
    counted = {key: one for key, one in contributions.by_key.items() if one.num_tokens}
    found: dict[int, dict[ContributionKey, Contribution]] = defaultdict(dict)
    for key, one in sorted((counted or contributions.by_key).items()):
        found[key[0]][key] = one
    return found


def _told_by(of_ranks: Collection[Mapping[ContributionKey, Contribution]]) -> set[Tell]:
    """What tells that each rank's passes have one batch. Labels do where all have some that tell."""
    every = [one for of_rank in of_ranks for one in of_rank.values()]
    known: list[Tell] = [_labels]
    if any(one.label_hash is None for one in every):
        known = [_inputs] if any(one.num_tokens for one in every) else [_inputs, _targets]
    values = {tell: [{tell(one) for one in of_rank.values()} for of_rank in of_ranks] for tell in known}
    return {tell for tell, sets in values.items() if sets and all(len(of) == 1 and None not in of for of in sets)}


def _are_evaluations(
    data: StepData, contributions: Contributions, passes: Mapping[ContributionKey, Contribution]
) -> bool:
    """Whether each pass has an evaluation of its own, and not all do the same."""
    evaluations = {one.loss.loss_id for one in passes.values() if one.loss is not None}
    if len(evaluations) < len(passes):
        return False
    return not have_one_value([*passes.values()]) or have_other_gradients(data, contributions, [*passes])
