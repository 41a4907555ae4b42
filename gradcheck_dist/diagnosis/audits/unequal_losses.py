"""Ranks that compute one loss together and get other values of it.

Ranks that exchange activations for the same tokens hold parts of one model. What they compute together, as over shards
of the vocabulary, is one number on all of them; where it is not, some sum or maximum over the ranks does not come, or
is taken over fewer of them. Gradients are then those of another function on each rank, which no weight shows.

So it is where ranks hold shards of one parameter as DTensors, whose exchanges are not recorded: all of them run one
program on the same numbers. One that goes on with a rank's summand (`to_local()` of a `Partial`) has losses of its own,
and a loss that is given another weight on one of them leaves its shards a gradient of their own.
"""

from __future__ import annotations

from collections import defaultdict
from math import isfinite

from gradcheck_dist.diagnosis.norms.step_norms import StepNorms
from gradcheck_dist.events import Exchange, RootValue
from gradcheck_dist.ledger.contributions import Contribution, Contributions, losses_of_rank
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import numbered

SAME = 1e-3
"""Relative difference of one loss on ranks that computed it together; with the same numbers it is equal bits."""
ROUNDED = 4
"""In bfloat16 and float16, so many times the type's precision."""
ONE_LOSS = "their losses differ"
ONE_WEIGHT = "give one loss of the same tokens unequal weights"


def unequal_losses(data: StepData, contributions: Contributions, norms: StepNorms) -> tuple[list[str], list[str]]:
    """Why a step is left open in which ranks with one model's parts and the same tokens have unequal losses, and what
    these are in the first of its passes."""
    shards = _sharing(norms)
    for one in contributions.by_key.values():
        values = _values(data, one)
        exchanging = _groups(data, one)
        for group in sorted(exchanging | {ranks & frozenset(one.ranks) for ranks in shards}, key=sorted):
            of_group = {rank: values[rank] for rank in sorted(group) if values.get(rank)}
            low, high = min(of_group.values(), default=0.0), max(of_group.values(), default=0.0)
            if high - low <= _allowed(one) * max(abs(low), abs(high)):
                continue
            among = numbered("rank", of_group)
            shown = ", ".join(f"{value:.6g}" for value in of_group.values())
            where = f" ({one.loss.site.short})" if one.loss is not None and one.loss.site is not None else ""
            do = "exchange activations" if group in exchanging else "hold shards of the same parameters"
            reason = (
                f"{among} {do} for the same tokens, and {ONE_LOSS}{where}: where they compute one loss together (over "
                "shards of the vocabulary, or by summands), a sum or maximum over them is missing, and what backward "
                "gives is the gradient of another function"
            )
            place = f"step {data.step}, accumulation step {one.key[1]}, microbatch {one.key[2]}"
            return [reason], [f"{place}: backward begins at {shown} on {among}"]
    return [], []


def unequal_weights(data: StepData, contributions: Contributions, norms: StepNorms) -> tuple[list[str], list[str]]:
    """The same of ranks that hold shards of one parameter and let one loss enter backward with unequal weights."""
    shards = _sharing(norms)
    losses = {rank: losses_of_rank(of_rank) for rank, of_rank in data.events.items()}
    for one in contributions.by_key.values():
        found = {rank: losses.get(rank, {}).get(one.key[1:], []) for rank in one.ranks}
        weights = {rank: [gradient.weight for gradient, _ in pairs] for rank, pairs in found.items() if pairs}
        for ranks in ({rank for rank in group if rank in weights} for group in shards):
            of_group = {rank: weights[rank] for rank in sorted(ranks)}
            if len({len(values) for values in of_group.values()}) != 1:
                continue
            for values in zip(*of_group.values(), strict=True):
                if max(values) - min(values) <= _allowed(one) * max(map(abs, values)):
                    continue
                among = numbered("rank", of_group)
                shown = ", ".join(f"{value:.6g}" for value in values)
                where = f" ({one.loss.site.short})" if one.loss is not None and one.loss.site is not None else ""
                reason = (
                    f"{among} hold shards of the same parameters and {ONE_WEIGHT}{where}: what each rank's "
                    "shards get is the gradient of a loss of that rank's own weight"
                )
                place = f"step {data.step}, accumulation step {one.key[1]}, microbatch {one.key[2]}"
                return [reason], [f"{place}: the loss enters backward with {shown} on {among}"]
    return [], []


def _sharing(norms: StepNorms) -> set[frozenset[int]]:
    """The ranks that hold shards of one parameter, for each parameter."""
    holders: dict[ParamKey, set[int]] = defaultdict(set)
    for (rank, key), part in norms.parts.items():
        if part.box is not None and not part.whole:
            holders[part.own or key].add(rank)
    return {frozenset(ranks) for ranks in holders.values()}


def _allowed(one: Contribution) -> float:
    return max(SAME, ROUNDED * EPSILON.get(one.loss.dtype, 0.0)) if one.loss is not None else SAME


def _values(data: StepData, one: Contribution) -> dict[int, float]:
    """The number that a contribution's pass begins at, on each rank that has one; none where a rank has several."""
    found: dict[int, list[float]] = {}
    for rank in one.ranks:
        for event in data.events.get(rank, ()):
            if isinstance(event, RootValue) and (event.accumulation_step, event.microbatch) == one.key[1:]:
                found.setdefault(rank, []).append(event.value)
    return {rank: values[0] for rank, values in found.items() if len(values) == 1 and isfinite(values[0])}


def _groups(data: StepData, one: Contribution) -> set[frozenset[int]]:
    """The ranks of a contribution among which activations were exchanged in its pass."""
    events = (event for rank in one.ranks for event in data.events.get(rank, ()))
    slots = (e for e in events if isinstance(e, Exchange) and (e.accumulation_step, e.microbatch) == one.key[1:])
    return {frozenset(event.group) & frozenset(one.ranks) for event in slots}
