"""Losses that one pass adds up, each with a coefficient: heads that predict further tokens, an auxiliary classifier.

A pass that adds up several counted losses gives its tokens several weights. Where these stand in one and the same
proportion in every pass and on every rank, they are terms with coefficients: the largest is the main loss, whose weight
an objective tells, and the others are terms whose coefficient nobody declared. Losses that weigh as much as the main
one, from its own line, may as well be its own summands (a mean for each sample, added up), and stay what they are.
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

Pass = Sequence[tuple[Loss, LossGradient]]
"""The counted losses of a pass, in the order of forward."""


@dataclass(frozen=True)
class Terms:
    """A step whose passes' losses are terms. `main` is the line of the main loss; `shares` is what each other term
    weighs of the main loss, by its name: both as sums over their own tokens of the step."""

    data: StepData
    main: str
    shares: Mapping[str, float]


def several_terms(data: StepData) -> Terms | None:
    """The same step with all losses but the largest as auxiliary terms; None where passes add up none, other ones in
    each pass, or in no fixed proportion."""
    found: list[tuple[int, Pass]] = []
    for rank, of_rank in data.events.items():
        found += [(rank, one) for one in _passes(of_rank)]
    if not found or len({tuple(map(_kind, one)) for _, one in found}) != 1 or len(found[0][1]) < 2:
        return None
    passes = [one for _, one in found]
    near = max([SAME, *(4 * EPSILON.get(loss.dtype, EPSILON["bfloat16"]) for loss, _ in passes[0])])
    if any(not _one_weight(gradient, near) for one in passes for _, gradient in one):
        return None
    groups, of_tokens = _groups(passes, near)
    shares = {group: median(_share(one, group, groups[0], of_tokens, passes) for one in passes) for group in groups}
    main = max(groups, key=lambda group: (shares[group], -group[0]))
    lines = [_line(loss) for loss, _ in passes[0]]
    others = [group for group in groups if group != main]
    for group in others:
        beside = {lines[i] for i in group} & {lines[i] for i in main}
        if beside and shares[group] >= shares[main] * (1 - near):
            return None
    if not others:
        return None
    names = {group: f"loss {number} at {lines[group[0]]}" for number, group in enumerate(groups, 1)}
    told = {names[group]: shares[group] / shares[main] for group in others}
    apart = {place: names[group] for group in others for place in group}
    return Terms(_renamed(data, found, apart), lines[main[0]], told)


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


def _kind(pair: tuple[Loss, LossGradient]) -> tuple[str, str]:
    return pair[0].op, _line(pair[0])


def _line(event: Event) -> str:
    return event.site.short if event.site is not None else "an unknown line"


def _one_weight(gradient: LossGradient, near: float) -> bool:
    values = [one for one in (gradient.weight, gradient.weight_min, gradient.weight_max) if one is not None]
    return min(values) > 0 and max(values) <= min(values) * (1 + near)


def _groups(passes: Sequence[Pass], near: float) -> tuple[list[tuple[int, ...]], bool]:
    """The losses by place in a pass, those of one weight together; and whether tokens, else means over each loss's own
    tokens, stand in one proportion. No group but one where neither do."""
    num = range(len(passes[0]))
    for of_tokens in (True, False):
        ratios = [[_weight(one, place, of_tokens) / _weight(one, 0, of_tokens) for one in passes] for place in num]
        if any(max(of_place) > min(of_place) * (1 + 2 * near) for of_place in ratios):
            continue
        members: dict[float, list[int]] = defaultdict(list)
        for place, of_place in enumerate(ratios):
            known = next((one for one in members if abs(median(of_place) / one - 1) <= near), median(of_place))
            members[known].append(place)
        return [tuple(places) for places in members.values()], of_tokens
    return [tuple(num)], True


def _weight(one: Pass, place: int, of_tokens: bool) -> float:
    gradient = one[place][1]
    return gradient.weight * (1 if of_tokens else gradient.num_tokens or 1)


def _share(one: Pass, group: tuple[int, ...], first: tuple[int, ...], of_tokens: bool, passes: Sequence[Pass]) -> float:
    """What a group of losses weighs beside the first one, over the tokens of all passes."""
    mine, other = (sum(_weight(one, place, of_tokens) for place in places) for places in (group, first))
    if not of_tokens:
        return mine / other
    tokens = [sum(each[place][1].num_tokens or 0 for each in passes for place in places) for places in (group, first)]
    return (mine / len(group) * tokens[0]) / (other / len(first) * tokens[1])


def _renamed(data: StepData, found: Sequence[tuple[int, Pass]], apart: Mapping[int, str]) -> StepData:
    names = {(rank, one[place][0].loss_id): name for rank, one in found for place, name in apart.items()}
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
