"""Losses that one pass adds up, each with a coefficient: heads that predict further tokens, an auxiliary classifier.

A pass that adds up several counted losses gives its tokens several weights. Where these stand in one and the same
proportion in every pass and on every rank, they are terms with coefficients: the largest is the main loss, whose weight
an objective tells, and the others are terms whose coefficient nobody declared. Losses that weigh as much as the main
one, from its own line, may as well be its own summands (a mean for each sample, added up), and stay what they are. A
pass may lack some of them: a rank without a batch of one task. Such a loss is never the main one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from gradcheck_dist.events import Event, Loss, LossGradient
from gradcheck_dist.ledger.contributions import UNKNOWN, losses_of_rank
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import StepData

SAME = 1e-3
"""Proportions nearer to one another than this, relative, are one; losses in narrow types are rounded further."""

Counted = tuple[Loss, LossGradient]
Pass = Sequence[Counted]
"""The counted losses of a pass, in the order of forward."""
Placed = Mapping[int, Counted]
"""The same, by their place in the pass that has all of them."""
Group = tuple[int, ...]


@dataclass(frozen=True)
class Terms:
    """A step whose passes' losses are terms. `main` is the line of the main loss; `shares` is what each other term
    weighs of the main loss, by its name: both as sums over their own tokens of the step. `partly`: some passes lack
    some of them, so that their tokens make no one mean."""

    data: StepData
    main: str
    shares: Mapping[str, float]
    partly: bool = False


def several_terms(data: StepData) -> Terms | None:
    """The same step with all losses but the largest as auxiliary terms; None where passes add up none, other ones in
    each pass, or in no fixed proportion."""
    of_ranks = [(rank, one) for rank, of_rank in data.events.items() for one in _passes(of_rank)]
    whole = max((one for _, one in of_ranks), key=len, default=())
    found = [(rank, _placed(one, whole)) for rank, one in of_ranks]
    passes = [one for _, one in found]
    always = [place for place, _ in enumerate(whole) if all(place in one for one in passes)]
    if len(whole) < 2 or not always:
        return None
    near = max([SAME, *(4 * EPSILON.get(loss.dtype, EPSILON["bfloat16"]) for loss, _ in whole)])
    if any(not _one_weight(gradient, near) for one in passes for _, gradient in one.values()):
        return None
    groups, of_tokens = _groups(passes, always[0], near)
    if len(groups) < 2:
        return None
    first = next(group for group in groups if group[0] == always[0])
    shares = {group: _share(group, first, of_tokens, passes) for group in groups}
    main = max((group for group in groups if group[0] in always), key=lambda group: (shares[group], -group[0]))
    lines = [_line(loss) for loss, _ in whole]
    others = [group for group in groups if group != main]
    for group in others:
        beside = {lines[i] for i in group} & {lines[i] for i in main}
        if beside and shares[group] >= shares[main] * (1 - near):
            return None
    names = {group: f"loss {number} at {lines[group[0]]}" for number, group in enumerate(groups, 1)}
    told = {names[group]: shares[group] / shares[main] for group in others}
    apart = {place: names[group] for group in others for place in group}
    return Terms(_renamed(data, found, apart), lines[main[0]], told, partly=len(always) < len(whole))


def _passes(events: list[Event]) -> list[Pass]:
    found: list[Pass] = []
    for pairs in losses_of_rank(events).values():
        counted = {
            loss.loss_id: (loss, gradient)
            for gradient, loss in pairs
            if loss is not None and loss.reduction != UNKNOWN and gradient.num_tokens
        }
        found.append(sorted(counted.values(), key=lambda pair: pair[0].seq))
    return found


def _placed(one: Pass, whole: Pass) -> Placed:
    """A pass's losses at the places of those of `whole`, with which it has to have each in common; {} where it has
    others, or where it is not known which of several from one line it lacks."""
    kinds = [_kind(pair) for pair in whole]
    if [_kind(pair) for pair in one] == kinds:
        return dict(enumerate(one))
    known = {kind: place for place, kind in enumerate(kinds)}
    own = {known.get(_kind(pair), -1): pair for pair in one}
    return own if -1 not in own and len(known) == len(kinds) and len(own) == len(one) else {}


def _kind(pair: Counted) -> tuple[str, str]:
    return pair[0].op, _line(pair[0])


def _line(event: Event) -> str:
    return event.site.short if event.site is not None else "an unknown line"


def _one_weight(gradient: LossGradient, near: float) -> bool:
    values = [one for one in (gradient.weight, gradient.weight_min, gradient.weight_max) if one is not None]
    return min(values) > 0 and max(values) <= min(values) * (1 + near)


def _groups(passes: Sequence[Placed], first: int, near: float) -> tuple[list[Group], bool]:
    """The losses by place, those of one weight that the same passes have together; and whether tokens, else means over
    each loss's own tokens, stand in one proportion to the first. No group but one where neither do."""
    places = sorted({place for one in passes for place in one})
    for of_tokens in (True, False):
        ratios = {
            place: [_weight(one, place, of_tokens) / _weight(one, first, of_tokens) for one in passes if place in one]
            for place in places
        }
        if any(max(of_place) > min(of_place) * (1 + 2 * near) for of_place in ratios.values()):
            continue
        members: dict[tuple[tuple[bool, ...], float], list[int]] = defaultdict(list)
        for place, of_place in ratios.items():
            has, usual = tuple(place in one for one in passes), median(of_place)
            known = next((key for key in members if key[0] == has and abs(usual / key[1] - 1) <= near), (has, usual))
            members[known].append(place)
        return [tuple(group) for group in members.values()], of_tokens
    return [tuple(places)], True


def _weight(one: Placed, place: int, of_tokens: bool) -> float:
    gradient = one[place][1]
    return gradient.weight * (1 if of_tokens else gradient.num_tokens or 1)


def _share(group: Group, first: Group, of_tokens: bool, passes: Sequence[Placed]) -> float:
    """What a group of losses weighs beside the first one, over the tokens of all passes."""
    having = [one for one in passes if group[0] in one]
    ratio = median(_of_group(one, group, of_tokens) / _of_group(one, first, of_tokens) for one in having)
    if not of_tokens:
        return ratio * len(having) / len(passes)
    of_group, of_first = (
        sum(one[place][1].num_tokens or 0 for one in passes for place in places if place in one)
        for places in (group, first)
    )
    return ratio * (len(first) / len(group)) * (of_group / of_first)


def _of_group(one: Placed, group: Group, of_tokens: bool) -> float:
    return sum(_weight(one, place, of_tokens) for place in group)


def _renamed(data: StepData, found: Sequence[tuple[int, Placed]], apart: Mapping[int, str]) -> StepData:
    names = {
        (rank, loss.loss_id): apart[place] for rank, one in found for place, (loss, _) in one.items() if place in apart
    }
    events: dict[int, list[Event]] = {
        rank: [
            msgspec.structs.replace(event, term=names[rank, event.loss_id])
            if isinstance(event, Loss) and (rank, event.loss_id) in names
            else event
            for event in of_rank
        ]
        for rank, of_rank in data.events.items()
    }
    return replace(data, events=events)
