"""Backward passes whose gradients were thrown away before the optimizer came.

Sharpness-aware and adversarial training evaluate a batch, take a gradient, empty the buffers and evaluate it again; a
warm-up runs a pass for its side effects. What was thrown away then is no part of the step. A zero_grad in the wrong
place throws away tokens that are never evaluated again: that is a fault and stays in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from gradcheck_dist.events import SHARDING, Backward, OptimizerStep, Reduce, ZeroGrad
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.trace.label_hashes import tell_no_batch

REEVALUATING = "LBFGS"
"""The optimizer of torch.optim that evaluates its closure more than once a step."""


def reevaluates(data: StepData) -> bool:
    """Whether all optimizers of a step evaluate their closures as often as they please."""
    steps = [event for events in data.events.values() for event in events if isinstance(event, OptimizerStep)]
    return bool(steps) and all(event.optimizer == REEVALUATING for event in steps)


def discarded(data: StepData, contributions: Contributions) -> set[ContributionKey]:
    """Contributions all of whose gradients were emptied before the step's first optimizer came; none where that is
    true of all."""
    lost: set[ContributionKey] = set()
    kept: set[ContributionKey] = set()
    for rank, events in data.events.items():
        first = next((event.seq for event in events if isinstance(event, OptimizerStep)), None)
        zeroed = [(e.seq, set(data.params_of(rank, e.params))) for e in events if isinstance(e, ZeroGrad)]
        for event in events:
            if not isinstance(event, Backward) or event.params is None:
                continue
            key = (contributions.coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
            touched = set(data.params_of(rank, event.params))
            gone = any(event.seq < seq < (first or seq + 1) and touched <= params for seq, params in zeroed)
            (lost if gone else kept).add(key)
    lost -= kept
    return lost if kept & set(contributions.by_key) else set()


def never_reduced(data: StepData, contributions: Contributions) -> set[ContributionKey]:
    """Contributions that a sharding wrapper of torch's keeps for a reduction that does not come before the step's first
    optimizer does (`set_requires_gradient_sync(False)` in the last pass): nobody threw these away."""
    waiting: set[ContributionKey] = set()
    for rank, events in data.events.items():
        first = next((event.seq for event in events if isinstance(event, OptimizerStep)), None)
        reduced: dict[int, int] = {}  # the last reduction of each parameter
        for event in events:
            if not isinstance(event, Reduce) or event.impl not in SHARDING or not event.all_reduced:
                continue
            if first is None or event.seq < first:
                reduced |= dict.fromkeys(data.params_of(rank, event.params), event.seq)
        for event in events:
            if isinstance(event, Backward) and event.params is not None:
                touched = data.params_of(rank, event.params)
                if touched and all(reduced.get(param, event.seq) < event.seq for param in touched):
                    coordinate = contributions.coordinate.get(rank, rank)
                    waiting.add((coordinate, event.accumulation_step, event.microbatch))
    return waiting


def emptied_at(data: StepData) -> str:
    """Where gradients were emptied before the step's optimizer came, as words to go into a sentence; "" where no such
    line was recorded."""
    for events in data.events.values():
        seen = False
        for event in events:
            if isinstance(event, OptimizerStep):
                break
            seen = seen or isinstance(event, Backward)
            if seen and isinstance(event, ZeroGrad) and event.site is not None:
                line = event.site.called_from or event.site.short
                return f" ({line.rpartition('/')[2]})"
    return ""


def without(contributions: Contributions, dropped: set[ContributionKey]) -> Contributions:
    by_key = {key: contribution for key, contribution in contributions.by_key.items() if key not in dropped}
    return replace(contributions, by_key=by_key)


def evaluated_again(contributions: Contributions, lost: set[ContributionKey]) -> set[ContributionKey]:
    """Those whose labels were evaluated again on the same rank, in a pass that was kept or a later one that was lost as
    well, as far as labels tell batches apart. Passes of one evaluation may take other labels of it each. Without
    labels, the same inputs and the same targets are one batch."""
    evaluations: dict[tuple[int, int | None], set[int | None]] = defaultdict(set)
    for key, c in contributions.by_key.items():
        if key not in lost:
            evaluations[key[0], c.label_hash].add(_evaluation(c))
    again: set[ContributionKey] = set()
    for key, c in sorted(contributions.by_key.items(), reverse=True):
        if key in lost and tell_batches(c):
            others = evaluations[key[0], c.label_hash]
            if others - {_evaluation(c)}:
                again.add(key)
            others.add(_evaluation(c))
    return again | {key for key, alike in _alike(contributions, lost) if True in alike}


def told_apart(contributions: Contributions, lost: set[ContributionKey]) -> set[ContributionKey]:
    """Those of which it is known whether their batch was evaluated again: by labels, or by inputs and targets that are
    both others than those of all passes that may have."""
    by_label = {key for key in lost & contributions.by_key.keys() if tell_batches(contributions.by_key[key])}
    return by_label | {key for key, alike in _alike(contributions, lost) if alike == {False}}


def _alike(
    contributions: Contributions, lost: set[ContributionKey]
) -> Iterator[tuple[ContributionKey, set[bool | None]]]:
    """Whether each lost pass without labels has the batch of those on its rank that were kept, and of later ones: True
    for the same inputs and targets, False for others of the same loop, None where one is the same (an adversary moves
    inputs, noise targets) or not known."""
    of_ranks: dict[int, list[ContributionKey]] = defaultdict(list)
    for key in contributions.by_key:
        of_ranks[key[0]].append(key)
    for key in lost & contributions.by_key.keys():
        one = contributions.by_key[key]
        if _batch(one) is not None:
            others = [other for other in of_ranks[key[0]] if other not in lost or other > key]
            yield key, {_are_one_batch(one, contributions.by_key[other]) for other in others if other != key}


def _are_one_batch(contribution: Contribution, other: Contribution) -> bool | None:
    one, two = _batch(contribution), _batch(other)
    if one is None or two is None:
        return None
    alike = {mine == theirs for mine, theirs in zip(one, two, strict=True)}
    if alike == {False} and _line(contribution) != _line(other):
        return None  # a pass for its statistics, or an adversary's
    return alike.pop() if len(alike) == 1 else None


def _line(contribution: Contribution) -> tuple[str, int] | None:
    """Where a pass begins."""
    site = contribution.gradient.site if contribution.gradient is not None else None
    return (site.file, site.line) if site is not None else None


def _batch(contribution: Contribution) -> tuple[int, int] | None:
    """Checksums of inputs and targets of a pass without labels; None where nobody looked."""
    loss = contribution.loss
    if loss is None or loss.inputs_hash is None or loss.targets_hash is None or contribution.label_hash is not None:
        return None
    return loss.inputs_hash, loss.targets_hash


def _evaluation(contribution: Contribution) -> int | None:
    return contribution.loss.loss_id if contribution.loss is not None else None


def tell_batches(contribution: Contribution) -> bool:
    """Whether labels were seen that are not the same numbers in every batch."""
    loss = contribution.loss
    return contribution.label_hash is not None and not (
        loss is not None and tell_no_batch(loss.num_labels, contribution.label_hash)
    )
