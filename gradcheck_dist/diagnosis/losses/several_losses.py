"""Losses that are differentiated one by one: each is a mean of its own, with a coefficient that nobody declared.

Multi-task trainers call backward once a task. Nothing says then that the tokens of all tasks share one mean, so where
one mean does not fit, each loss is taken for an objective of its own. Passes of one step are different losses when they
start from different lines, and either train different parameters (a head each), count the same labels, or take turns.
Two branches of one accumulation loop (the last pass outside of `no_sync`) train the same parameters on other labels,
and are one loss. So are passes that add up several losses and have one of these in common. A loop over tasks (`for
head, labels in tasks: ...`) runs them all from one line: there, passes that each reach parameters which no other one
reaches may be losses of their own, or microbatches of a model that is called in part (experts), and the verdict stays
open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import chain

import numpy as np

from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.one_batch import passes_of_one_batch
from gradcheck_dist.diagnosis.weights.cells import Held, judge
from gradcheck_dist.diagnosis.weights.loops import are_branches
from gradcheck_dist.events import Backward, Event
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions
from gradcheck_dist.ledger.discarded import tell_batches
from gradcheck_dist.ledger.expected import expected_weights
from gradcheck_dist.ledger.handed_on import is_handed_on
from gradcheck_dist.ledger.one_forward import Forwards
from gradcheck_dist.ledger.tracks import ParamKey, StepData

SAME = 1e-3
"""Factors nearer to one another than this, relative, are one."""
MIXED = 1e-4
"""How near, relative, a coefficient of a mixture is to the number that was written."""
MEANT = "whether these are coefficients that are meant or wrong normalisers"
ADD_UP = (
    "whether they are losses that are meant to add up (parts of a network, an adversary's steps) or lack a division by "
    "their number"
)
AS_OFTEN = "its gradient enters as often"
Place = tuple[str, str]
"""The lines of a loss: where it was computed, where its backward pass began."""


@dataclass
class OwnMeans:
    """What the weights are compared with. `remarks` say what was inferred, `reasons` what stays open. `forwards`: the
    passes of each forward pass that several of them differentiate; `combined`: where the program's own lines treat
    these apart, in words."""

    aim: Aim
    forwards: Forwards = field(default_factory=list)
    combined: str = ""
    remarks: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def loss_by_loss(target: Aim, objective: str, data: StepData, measured: list[Held]) -> OwnMeans:
    """The same aim where one mean over all tokens fits or one loss was seen; else a mean for each loss."""
    counted = {key: c for key, c in target.contributions.by_key.items() if target.tokens.get(key)}
    losses = _by_place(counted)
    if target.relative or fits(measured, target.contributions, target.expected):
        return OwnMeans(target)
    if any(map(is_handed_on, counted.values())) and _is_one_loss(counted):
        return OwnMeans(target)
    passes = reached_by(data, target.contributions)
    in_a_loop, of_one_batch = len(losses) < 2, False
    same = passes_of_one_batch(data, target.contributions) if target.contributions.one_batch else []
    as_passes = {("", str(index)): keys for index, keys in enumerate(same)}
    if in_a_loop:
        mixture = _mixture(target, objective, measured)
        losses = _by_parameters(counted, passes)
        if as_passes and len(losses) < 2 and mixture is None:
            of_one_batch, losses = True, as_passes
        if mixture is not None or len(losses) < 2:
            return mixture or OwnMeans(target)
    touched = _touched(losses, passes)
    trained_apart = len(set(touched.values())) == len(losses)
    take_turns = not trained_apart and not of_one_batch and not _same_labels(losses, counted)
    if take_turns and not _take_turns(losses, counted, data):
        if not as_passes:
            return OwnMeans(target)
        of_one_batch, take_turns, losses = True, False, as_passes
        touched = _touched(losses, passes)
    own = own_weights(target, objective, losses.values())
    shares = {place: usual(measured, target.contributions, own, keys) for place, keys in losses.items()}
    for place, keys in losses.items():
        of_others = (reached for other, reached in touched.items() if other != place)
        if touched[place].isdisjoint(chain.from_iterable(of_others)):
            # What a model of its own is wrong by, a reduction that lacks, is no coefficient of its loss.
            shares[place] = shares[place] if _all_weigh(shares[place], measured, target, own, keys) else 1.0
    if of_one_batch and (written := _divided_at_most(counted, len(losses))):
        times = len({key[0] for key in counted})
        if all(abs(share / written / times - 1) <= SAME for share in shares.values()):
            shares = dict.fromkeys(shares, written)  # what follows lacks a division by ranks
    lines = " and ".join(dict.fromkeys(place[1] or place[0] for place in map(_place, counted.values())))
    whole = all(abs(share - 1) <= SAME for share in shares.values())
    if trained_apart and not in_a_loop and whole:
        inferred = "train parameters of their own and are taken for objectives of their own, each over its own tokens"
        return OwnMeans(
            replace(target, expected=target.filled(own)), remarks=[f"the losses at {lines} {inferred} (inferred)"]
        )
    scaled = {key: own[key] * Fraction(shares[place]) for place, keys in losses.items() for key in keys}
    each = whole or (_unseen(counted) and _each_pass_whole(losses, shares))
    if take_turns and not (each and fits(measured, target.contributions, target.filled(scaled))):
        return OwnMeans(target)  # halves are parts of one loss; beside what else is wrong less is assumed
    shown = " and ".join(f"x {share:.4g}" for share in shares.values())
    apart = "in passes that train parameters of their own" if in_a_loop else "one by one"
    if of_one_batch:
        apart = f"in passes on one batch (the same {_what(counted)} in each)"
    reason = (
        f"the losses at {lines} are differentiated {apart}, and weigh {shown} of a mean over their own tokens"
        f"{_as_many_as_passes(losses, shares)}: "
        f"{ADD_UP if of_one_batch and whole else MEANT} is not known. "
        "gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) tells"
    )
    if _are_one(losses, counted):
        reason = (
            f"each loss goes backward at {lines}, and weighs {shown} of a mean over its tokens there: {AS_OFTEN}, "
            "unless lines that nobody records take one away or divide by their number"
        )
    return OwnMeans(replace(target, expected=target.filled(scaled)), reasons=[reason])


def _touched(
    losses: Mapping[Place, Iterable[ContributionKey]], passes: Mapping[ContributionKey, frozenset[ParamKey]]
) -> dict[Place, frozenset[ParamKey]]:
    """The parameters that the passes of each loss reached."""
    return {place: frozenset[ParamKey]().union(*(passes.get(key, ()) for key in keys))
            for place, keys in losses.items()}  # fmt: skip


def _all_weigh(
    share: float,
    measured: list[Held],
    target: Aim,
    own: Mapping[ContributionKey, Fraction],
    keys: Iterable[ContributionKey],
) -> bool:
    """Whether all weights of a loss are off by this factor, as far as they were measured."""
    wanted = set(keys)
    cells = (cell for held in judge(measured, target.contributions, dict(own)) for cell in held.cells)
    return all(abs(cell.ratio - share) <= max(cell.margin, SAME * share) for cell in cells if cell.key in wanted)


def _as_many_as_passes(losses: Mapping[Place, Iterable[ContributionKey]], shares: Mapping[Place, float]) -> str:
    """What a weight says, in words, that is the number of a loss's passes for each of them; "" where it is not."""
    passes = _num_passes(losses)
    if not all(num > 1 and abs(shares[place] - num) <= SAME * num for place, num in passes.items()):
        return ""
    return ", as many as each has passes, which a forgotten division would leave"


def _num_passes(losses: Mapping[Place, Iterable[ContributionKey]]) -> dict[Place, int]:
    return {place: max(Counter(key[0] for key in keys).values()) for place, keys in losses.items()}


def _each_pass_whole(losses: Mapping[Place, Iterable[ContributionKey]], shares: Mapping[Place, float]) -> bool:
    """Whether each pass of these losses weighs as a mean of its own, which nobody divides by their number."""
    return all(abs(shares[place] - num) <= SAME * num for place, num in _num_passes(losses).items())


def _unseen(counted: Mapping[ContributionKey, Contribution]) -> bool:
    """Whether no labels were seen, which could tell whether passes are of one batch."""
    return all(one.label_hash is None for one in counted.values())


def _divided_at_most(counted: Mapping[ContributionKey, Contribution], num_passes: int) -> float:
    """What all losses weigh, each as a mean over its tokens: 1, or 1 / the number of passes; 0 where a coefficient may
    stand there."""
    weights = [(one.weight or 0.0) * (one.num_tokens or 0) for one in counted.values()]
    known = (one for one in (1.0, 1 / num_passes) if all(abs(weight / one - 1) <= SAME for weight in weights))
    return next(known, 0.0)


def _what(counted: Mapping[ContributionKey, Contribution]) -> str:
    """What tells that passes have one batch (one_batch.py), in a word."""
    return "inputs" if any(one.label_hash is None for one in counted.values()) else "labels"


def _are_one(
    losses: Mapping[Place, Iterable[ContributionKey]], counted: Mapping[ContributionKey, Contribution]
) -> bool:
    """Whether what begins on several lines is the same losses, each evaluated once."""
    gradients = [[(counted[key].loss_rank, counted[key].gradient) for key in keys] for keys in losses.values()]
    ids = [{(rank, one.loss_id if one is not None else None) for rank, one in of_place} for of_place in gradients]
    return len(ids) > 1 and all(one == ids[0] for one in ids) and not any(loss_id is None for _, loss_id in ids[0])


def own_weights(
    target: Aim, objective: str, groups: Iterable[Iterable[ContributionKey]]
) -> dict[ContributionKey, Fraction]:
    """What contributions should weigh where each group of them has an objective of its own."""
    own: dict[ContributionKey, Fraction] = {}
    for keys in groups:
        own |= expected_weights(objective, {key: target.tokens[key] for key in keys})
    return own


def _mixture(target: Aim, objective: str, measured: list[Held]) -> OwnMeans | None:
    """One loss whose accumulation steps have a coefficient each (0.7 of code, 0.3 of text): unequal numbers that
    somebody wrote and that add up to 1, each times the mean over the tokens of its step."""
    steps: dict[int, list[ContributionKey]] = defaultdict(list)
    for key, count in target.tokens.items():
        if count:
            steps[key[1]].append(key)
    known = {key: weight for key, weight in target.expected.items() if weight}
    if not known or weigh_as(known, target.contributions):
        return None  # something behind the losses did it
    own = own_weights(target, objective, steps.values())
    shares = {k: usual(measured, target.contributions, own, keys) for k, keys in steps.items()}
    numbers = {k: Fraction(round(100 * share), 100) for k, share in shares.items()}
    written = all(abs(share - numbers[k]) <= MIXED * share for k, share in shares.items())
    if not written or sum(numbers.values()) != 1 or len(set(numbers.values())) < 2:
        return None
    scaled = {key: own[key] * numbers[k] for k, keys in steps.items() for key in keys}
    shown = ", ".join(f"{float(number):g}" for number in numbers.values())
    reason = (
        f"the accumulation steps weigh {shown} of a mean over the tokens of each, which add up to 1: coefficients of a "
        "mixture, if they are meant. gradcheck_dist.mark_loss(loss_sum, num_tokens, coefficient=...) tells"
    )
    if weigh_as(scaled, target.contributions):
        return OwnMeans(replace(target, expected=target.filled(scaled)), reasons=[reason])
    return None


def weigh_as(expected: Mapping[ContributionKey, Fraction], contributions: Contributions) -> bool:
    """Whether the weights at the losses are as expected, up to a factor."""
    found = [(contributions.by_key[key].weight or 0.0) / float(weight) for key, weight in expected.items()]
    return max(found) <= min(found) * (1 + SAME)


def _by_parameters(
    counted: Mapping[ContributionKey, Contribution], passes: Mapping[ContributionKey, frozenset[ParamKey]]
) -> dict[Place, list[ContributionKey]]:
    """The contributions by what their passes reached, where each of several such sets has parameters that no other
    one has, on every data rank; {} where it is not so."""
    members: dict[frozenset[ParamKey], list[ContributionKey]] = defaultdict(list)
    for key in sorted(counted):
        members[passes.get(key, frozenset())].append(key)
    everyone = {key[0] for key in counted}
    for reached, keys in members.items():
        others = frozenset[ParamKey]().union(*(other for other in members if other != reached))
        if not reached - others or {key[0] for key in keys} != everyone:
            return {}
    return {("", str(index)): keys for index, keys in enumerate(members.values())}


def _by_place(counted: Mapping[ContributionKey, Contribution]) -> dict[Place, list[ContributionKey]]:
    """The contributions of each loss, by its lines."""
    sums: dict[str, list[frozenset[str]]] = defaultdict(list)
    for one in counted.values():
        if len(one.lines) > 1:
            sums[line_of(one.gradient)].append(one.lines)
    found: dict[Place, list[ContributionKey]] = defaultdict(list)
    for key, contribution in sorted(counted.items()):
        loss, root = _place(contribution)
        together = {loss}.union(*(lines for lines in sums[root] if lines & contribution.lines))
        found[min(together), root].append(key)
    return found


def _is_one_loss(counted: Mapping[ContributionKey, Contribution]) -> bool:
    """Whether all passes but those that hand on what others left start from one line."""
    return len({_place(one) for one in counted.values() if not is_handed_on(one)}) < 2


def _place(contribution: Contribution) -> Place:
    return (line_of(contribution.loss), line_of(contribution.gradient))


def line_of(event: Event | None) -> str:
    """The line on which an event happened, in short, or the user's own that led into a library there (accelerate's
    backward); "" where that is not known."""
    site = event.site if event is not None else None
    return (site.called_from or "").rpartition("/")[2] or site.short if site is not None else ""


def fits(measured: list[Held], contributions: Contributions, expected: Mapping[ContributionKey, Fraction]) -> bool:
    """Whether all weights are right as they are expected."""
    return all(cell.right for held in judge(measured, contributions, dict(expected)) for cell in held.cells)


def reached_by(data: StepData, contributions: Contributions) -> dict[ContributionKey, frozenset[ParamKey]]:
    """The parameters that a contribution's backward pass reached, on the rank of its loss."""
    names = {(rank, track.param.id): key for key, of_rank in data.tracks.items() for rank, track in of_rank.items()}
    found: dict[ContributionKey, frozenset[ParamKey]] = {}
    for key, contribution in contributions.by_key.items():
        rank = contribution.loss_rank
        for event in data.events.get(rank, ()) if rank is not None else ():
            if isinstance(event, Backward) and (event.accumulation_step, event.microbatch) == key[1:]:
                reached = data.params_of(rank or 0, event.params)
                found[key] = frozenset(names[rank or 0, param] for param in reached if (rank or 0, param) in names)
    return found


def _same_labels(
    losses: Mapping[Place, Iterable[ContributionKey]], counted: Mapping[ContributionKey, Contribution]
) -> bool:
    """Whether every loss counts the same labels. Those that are the same numbers in every batch (a contrastive loss's
    0 to n-1) tell that only of losses that were computed on lines of their own."""
    hashes = [{(key[0], counted[key].label_hash) for key in keys} for keys in losses.values()]
    computed_apart = len({place[0] for place in losses}) == len(losses)
    tell = computed_apart or all(tell_batches(counted[key]) for keys in losses.values() for key in keys)
    return tell and all(one == hashes[0] for one in hashes) and not any(value is None for _, value in hashes[0])


def _take_turns(
    losses: Mapping[Place, Iterable[ContributionKey]], counted: Mapping[ContributionKey, Contribution], data: StepData
) -> bool:
    """Whether the passes of several losses, one in each and as many of each, have lines of their own and are reduced
    alike (a batch and one that is replayed): of two branches of an accumulation loop, one has a pass alone and
    reduces, or both have one line for the loss or its backward, or differentiate the same. Where no labels were seen,
    all passes may be of one batch (a network, and then its parts by what it predicted), and one loss may have more of
    them. A line in a function that is called from another place for each loss is a line for each."""
    numbers = [Counter(key[0] for key in keys) for keys in losses.values()]
    slots = {(one.loss_rank, *key[1:]) for key, one in counted.items()}
    reduced = {
        event.sync
        for rank, events in data.events.items()
        for event in events
        if isinstance(event, Backward) and (rank, event.accumulation_step, event.microbatch) in slots
    }
    computed, begun = (len(set(lines)) == len(losses) for lines in zip(*losses, strict=True))
    apart = not any("" in place for place in losses) and begun and (computed or _called_apart(losses, counted))
    alone = all(one.num_losses == 1 for one in counted.values())
    as_often = all(number == numbers[0] for number in numbers)
    if are_branches(counted.values()):
        return False
    return apart and alone and len(reduced) == 1 and (as_often or _unseen(counted))


def _called_apart(
    losses: Mapping[Place, Iterable[ContributionKey]], counted: Mapping[ContributionKey, Contribution]
) -> bool:
    """Whether each loss was called from places of its own on every rank, as far as all are known."""
    of_each = [{(one.loss_rank, one.loss.called_from if one.loss is not None else None) for one in ones}
               for ones in ([counted[key] for key in keys] for keys in losses.values())]  # fmt: skip
    known = all(place is not None for places in of_each for _, place in places)
    return known and sum(map(len, of_each)) == len(set[tuple[int | None, int | None]]().union(*of_each))


def usual(
    measured: list[Held],
    contributions: Contributions,
    expected: Mapping[ContributionKey, Fraction],
    keys: Iterable[ContributionKey],
) -> float:
    """By what most of a loss's weights are off, of several as frequent factors the one at the loss, as the weight tells
    that was measured best; 1 where none is known."""
    own = {key: expected[key] for key in keys if key in expected}
    found = [cell for held in judge(measured, contributions, own) for cell in held.cells if cell.ratio > SAME]
    if not found:
        return 1.0
    ratios = np.array([cell.ratio for cell in found])
    in_order = np.sort(ratios)
    upper = np.searchsorted(in_order, ratios * (1 + SAME), side="right")
    alike = upper - np.searchsorted(in_order, ratios * (1 - SAME), side="left")
    most = [found[index] for index in np.flatnonzero(alike == alike.max())]
    first = max(most, key=lambda cell: abs(cell.ratio / cell.root_ratio - 1) <= SAME if cell.root_ratio else False)
    same = (cell for cell in found if abs(cell.ratio - first.ratio) <= SAME * first.ratio)
    return min(same, key=lambda cell: cell.stderr).ratio
