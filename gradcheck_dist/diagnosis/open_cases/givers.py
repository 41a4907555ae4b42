"""Means over the ranks that gave something: one without an image, or one that heals, is not counted."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import numbered

EXACT = 1e-5
"""Relative: how near a ratio of counts must be."""
NOTHING = 1e-3
"""A weight, relative to the right one, that is as good as none."""


def mean_of_givers(case: Case, data: StepData) -> str | None:
    """Why a number of a trainer's own line accuses nobody: it makes a mean over the ranks that gave a gradient.

    A vision tower is averaged over the ranks whose batch has an image, a sum over replicas is divided by those that
    take part in the step (Megatron's MIMO, Ray's RLlib, torchft). Whether parameters that a part of the batch does not
    reach should follow the mean over all of it, or over that part, nobody declares.
    """
    if case.culprit.absent or case.pattern.kind != "uniform" or case.pattern.factor <= 1:
        return None
    givers = {held.param: _givers(held.param, case, data) for held in case.held}
    if len(set(givers.values())) != 1:
        return None
    (ranks,) = set(givers.values())
    names = _counted(case, ranks) if ranks else None
    if ranks is None or names is None:
        return None
    shown = in_short(sorted({name for _, name in givers}))
    line = case.culprit.write.site if case.culprit.write is not None else None
    where = f" ({line.short})" if line is not None else ""
    return (
        f"{shown}: only {numbered('data rank', ranks)} gave a gradient in step {data.step}, and it is x "
        f"{case.pattern.factor:.6g} of its part of the mean over all {names}: the mean over what was given alone{where}"
        ". Where ranks without an image, or that heal, are not to count, that is meant, and whether it is is not known"
    )


def only_others_gave(step: int, ranks: Collection[int]) -> str:
    """Why a step accuses nobody of which nothing of some data ranks is in any gradient, and which is judged without."""
    return (
        f"nothing of {numbered('data rank', sorted(ranks))} is in any gradient of step {step}: judged as the mean over "
        "what was given alone. Where ranks that heal are not to count, that is meant, and whether it is is not known"
    )


def _givers(param: ParamKey, case: Case, data: StepData) -> frozenset[int] | None:
    """The data ranks whose contributions weigh anything in a parameter, the same ones on all ranks that hold it; None
    where these differ, or some contributions of one rank weigh nothing."""
    coordinate = case.context.contributions.coordinate
    reached = {
        (coordinate.get(rank, rank), *slot) for rank, track in data.tracks[param].items() for slot in track.leaves
    }
    found: set[frozenset[int]] = set()
    for held in case.held:
        if held.param != param:
            continue
        weigh = {cell.key for cell in held.cells if abs(cell.ratio) > NOTHING}
        ranks = frozenset(key[0] for key in weigh)
        if any(key[0] in ranks and key not in weigh for key in reached):
            return None
        found.add(ranks)
    holders = {rank for held in case.held if held.param == param for rank in held.ranks}
    return next(iter(found)) if len(found) == 1 and holders == data.tracks[param].keys() else None


def _counted(case: Case, ranks: frozenset[int]) -> str | None:
    """What the factor is all of over that of `ranks`: tokens or ranks; None where it is neither."""
    by_key = case.context.contributions.by_key
    everyone = {key[0] for key in by_key}
    if not ranks < everyone:
        return None
    tokens = {key: c.num_tokens or 0 for key, c in by_key.items()}
    part = sum(count for key, count in tokens.items() if key[0] in ranks)
    allowed = max(2 * case.pattern.tolerance, EXACT)
    for words, factor in (
        ("ranks", Fraction(len(everyone), len(ranks))),
        ("tokens", Fraction(sum(tokens.values()), part) if part else Fraction(0)),
    ):
        if factor and abs(case.pattern.factor / float(factor) - 1) <= allowed:
            return words
    return None
