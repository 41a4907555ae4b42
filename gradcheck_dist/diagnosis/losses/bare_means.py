"""Losses that count nothing and are means: how often their sum was forgotten to be divided.

A mean squared error or a binary cross-entropy counts no tokens, and a number beside it may be a coefficient. Where the
program multiplies the mean by nothing at all, or by 1 / accumulation steps alone, no coefficient is meant. If passes
of one line, over the same parameters, one computed after the other, add up to as many means as there are accumulation
steps, or data ranks, nobody divides by them. And where some of these passes are divided by accumulation steps, those
that nothing multiplies were forgotten. Where all come out as 1/ranks or 1/passes of their average, what follows the
loss divides once too often. And where the program's source calls what multiplies the means counts of ranks and passes,
these are no coefficients: what is left of them in the gradient is one too many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import isfinite, prod

from gradcheck_dist.diagnosis.losses.elements import GAINS, beneath_mean, weights_of_means, weights_of_passes
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.loops import one_loop
from gradcheck_dist.diagnosis.weights.named_counts import (
    common_numbers,
    counts_before,
    may_be_a_coefficient,
    ranks_before,
)
from gradcheck_dist.diagnosis.weights.written import scales_by_hand
from gradcheck_dist.events import AmpUnscale
from gradcheck_dist.ledger.contributions import UNKNOWN, ContributionKey, Contributions
from gradcheck_dist.ledger.discarded import reevaluates
from gradcheck_dist.ledger.tracks import StepData

SAME = 1e-3
LARGER = 1.05
KINDS = 2
"""Passes of a discriminator, on real and on generated data: of a distance by hand the targets are not known."""
Judge = Callable[[list[Held], Contributions, dict[ContributionKey, Fraction]], list[Held]]


def added_means(
    data: StepData, contributions: Contributions, measured: list[Held], judge: Judge
) -> tuple[Contributions, dict[ContributionKey, Fraction]] | None:
    """The contributions as means that each count alike, and what each should weigh, where all together weigh as many
    times too much as there are accumulation steps, data ranks or both, or some of them as many times as there are
    accumulation steps, which the others are divided by. None where that is not what happened, a coefficient may be
    meant, or the passes may be evaluations of one batch."""
    if reevaluates(data):
        return None
    by_key = contributions.by_key
    ranks = {key[0] for key in by_key}
    num_steps, num_ranks = len(by_key) // max(len(ranks), 1), len(ranks)
    slots = [{key[1:] for key in by_key if key[0] == rank} for rank in ranks]
    if num_steps == KINDS and any(c.loss is None or c.loss.op == UNKNOWN for c in by_key.values()):
        return None
    counts, weights = counts_before(contributions), _of_means(contributions)
    # Of means of other kinds, which may be added up by design, one thing is known: whom its source calls ranks.
    by_ranks = not weights and any(abs(one * num_ranks - 1) <= SAME for one in ranks_before(contributions))
    if by_ranks:
        weights = next(iter(weights_of_passes(contributions)), {})
    are_gains = all(c.loss is not None and c.loss.op in GAINS for c in by_key.values())
    negated = are_gains and max(weights.values(), default=0.0) < 0
    if negated:
        weights = {key: -weight for key, weight in weights.items()}
    written = _written(data, contributions, weights, counts, num_signs=int(negated)) if weights else None
    if written is None or any(of_rank != slots[0] for of_rank in slots) or not one_loop(data, contributions):
        return None
    # Accumulation steps, a pipeline's microbatches in each, and all of these.
    of_passes = {num_steps, *(len(set(parts)) for parts in zip(*slots[0], strict=True))}
    divisors = {key: _divisor(weight, {1, *of_passes}) for key, weight in written.items()}
    wrong, numbers = set(by_key), set[int]()
    match sorted(set(divisors.values())):
        case [0, *_]:
            return None
        case [divisor]:
            left = 1 if contributions.one_batch else num_steps // divisor
            numbers = {num_ranks, left, left * num_ranks, *(of_passes if divisor == 1 and left > 1 else ())}
        case [1, last] if last == num_steps and not contributions.one_batch:
            wrong, numbers = {key for key, divisor in divisors.items() if divisor == 1}, {num_steps}
    counted = {key: replace(c, num_tokens=1, weight=weights[key], spread=0.0) for key, c in by_key.items()}
    # Of one batch each pass's mean is whole, or as it is divided: by design they may add up.
    whole = num_ranks * max(divisors.values()) if contributions.one_batch else len(by_key)
    expected = dict.fromkeys(by_key, Fraction(1, whole))
    means = replace(contributions, by_key=counted)
    cells = [cell for held in judge(measured, means, expected) for cell in held.cells]
    beneath = {beneath_mean(c.gradient) for c in by_key.values() if c.gradient is not None}
    for number in numbers - {1} if cells and not by_ranks else ():
        if any(_may_divide(one, number) for one in beneath if one is not None):
            continue
        if all(_is_times(cell, number if cell.key in wrong else 1) for cell in cells):
            return means, expected
    # Half a squared error may be meant, and two passes divided behind it: `0.5 *` is another thing than `/ 2`.
    halved = {round(1 / one.factor) for one in common_numbers(contributions) if may_be_a_coefficient(one)}
    by_any = {num_ranks} if by_ranks or contributions.one_batch else {num_ranks, num_steps, num_ranks * num_steps}
    for number in by_any - {1} - halved if cells and wrong == set(by_key) else ():
        if all(_is_times(cell, 1 / number) for cell in cells):
            return means, expected
    return None


def _divisor(weight: float, numbers: set[int]) -> int:
    """What a mean is divided by; 0 where that is none of these numbers."""
    return next((number for number in numbers if abs(weight * number - 1) <= SAME), 0)


def _is_times(cell: Cell, number: float) -> bool:
    return abs(cell.ratio - number) <= max(cell.margin, SAME * number)


def _of_means(contributions: Contributions) -> dict[ContributionKey, float]:
    """What each pass's mean weighs at the loss; empty where some are no means."""
    found = {}
    for key, one in contributions.by_key.items():
        if one.gradient is None or one.gradient.mean_weight is None:
            return weights_of_means(contributions)
        found[key] = one.gradient.mean_weight
    return found


def _written(
    data: StepData,
    contributions: Contributions,
    weights: Mapping[ContributionKey, float],
    counts: Sequence[float],
    *,
    num_signs: int,
) -> dict[ContributionKey, float] | None:
    """The number that multiplies each mean, freed of a loss scale, of signs and of `counts`; None where others stand
    beside it, or it is not known."""
    weights = {key: weight / prod(counts) for key, weight in weights.items()}
    scales = {e.scale for of_rank in data.events.values() for e in of_rank if isinstance(e, AmpUnscale)}
    most = min(map(abs, weights.values())) * len(weights)  # what divides by more divides by a count
    scales |= {scale for scale in scales_by_hand(data) if scale <= most * (1 + SAME)}
    share = _share_of_elements(contributions)
    if len(scales) > 1 or (share is not None and share <= LARGER / len(weights)):  # which may hold the division
        return None
    written = {key: weight / next(iter(scales), 1.0) for key, weight in weights.items()}
    # A coefficient may be just what the losses are divided by: then it stands there as a number of its own.
    by_count = any(c.gradient is not None and c.gradient.reduced_by == "sum" for c in contributions.by_key.values())
    for key, weight in written.items():
        gradient = contributions.by_key[key].gradient
        if gradient is None or not isfinite(weight):
            return None
        seen = len(scales) + by_count + num_signs + len(counts) + (abs(weight - 1) > SAME)
        beneath = beneath_mean(gradient) or 1.0
        if gradient.num_factors - seen not in {0, int(abs(beneath - 1) > SAME)}:
            return None
    return written


def _may_divide(beneath: float, number: int) -> bool:
    """Whether what multiplies each element beneath its mean (the half of a squared error) may be a part of a division
    by a number of passes or ranks."""
    part = round(1 / beneath) if 0 < beneath <= 1 else 1
    return part > 1 and abs(beneath * part - 1) <= SAME and number % part == 0


def _share_of_elements(contributions: Contributions) -> float | None:
    """What weights of elements (masks, a schedule's, a sample's) leave of the mean without them, in all passes on
    average; None where nothing weighs elements apart."""
    shares = [
        c.gradient.element_share
        for c in contributions.by_key.values()
        if c.gradient is not None and c.gradient.element_share is not None
    ]
    mean = sum(shares) / len(shares) if shares else 1.0
    return None if abs(mean - 1) <= SAME else mean
