"""Passes of a loop that all evaluate one batch: parts of a network (once-for-all), an adversary's steps, views.

Their losses add up by design, or lack a division by their number: both leave the same weights. Microbatches of an
accumulation have labels of their own, so labels tell passes of one batch apart from these, where other steps have other
ones: a sampler may draw the same classes in every batch (diagnosis/steps/alternatives.py looks). A batch that a short
test repeats in all passes gives one value and one gradient there as well, and is accumulated. So are the samples of one
evaluation that go backward one by one.
"""

from __future__ import annotations

from collections import defaultdict

from gradcheck_dist.diagnosis.losses.parts import have_one_value, have_other_gradients
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.discarded import tell_batches
from gradcheck_dist.ledger.tracks import Slot, StepData


def may_be_one_batch(data: StepData, contributions: Contributions) -> bool:
    """Whether all passes of a step that count tokens have the same labels, so far as this step tells."""
    counted = [key for key, one in contributions.by_key.items() if one.num_tokens]
    return bool(passes_of_one_batch(data, contributions, counted))


def passes_of_one_batch(
    data: StepData, contributions: Contributions, counted: list[ContributionKey]
) -> list[list[ContributionKey]]:
    """The counted contributions of each pass, in the order of passes, where all passes of every data rank evaluate the
    same labels, to other values or gradients; [] where it is not so."""
    of_ranks: dict[int, list[ContributionKey]] = defaultdict(list)
    passes: dict[Slot, list[ContributionKey]] = defaultdict(list)
    for key in sorted(counted):
        of_ranks[key[0]].append(key)
        passes[key[1:]].append(key)
    as_many = len(passes) > 1 and all(len(keys) == len(of_ranks) for keys in passes.values())
    again = as_many and all(_evaluate_one_batch(data, contributions, keys) for keys in of_ranks.values())
    return list(passes.values()) if again else []


def _evaluate_one_batch(data: StepData, contributions: Contributions, keys: list[ContributionKey]) -> bool:
    passes = [contributions.by_key[key] for key in keys]
    labels = {(one.label_hash, one.num_tokens) for one in passes}
    evaluations = {one.loss.loss_id for one in passes if one.loss is not None}
    if len(labels) > 1 or len(evaluations) < len(passes) or not all(map(tell_batches, passes)):
        return False
    return not have_one_value(passes) or have_other_gradients(data, contributions, keys)
