"""Factors at a loss that may be coefficients: other losses stand beside it, or its targets are soft."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from math import prod, sqrt

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.norms.clips import is_round
from gradcheck_dist.diagnosis.weights.bare_sums import are_bare_sums
from gradcheck_dist.diagnosis.weights.degrees import is_of_degrees, same
from gradcheck_dist.diagnosis.weights.loops import one_loop
from gradcheck_dist.events import AmpUnscale, Loss, LossGradient
from gradcheck_dist.ledger.contributions import Contribution, Contributions, losses_of_rank
from gradcheck_dist.ledger.discarded import tell_batches
from gradcheck_dist.ledger.tracks import StepData

SOFT_TARGETS = "log_softmax"
"""Op of a loss whose targets are no labels: probes/losses/unseen.py."""
SAME = 1e-3
"""Factors nearer to one another than this, relative, are the same."""
EXACT = 1e-5
"""How near, relative, a factor is to the number of ranks or passes that makes it."""
HOTTEST = 10
"""The largest temperature of which a square is believed."""


def coefficient(case: Case, data: StepData) -> str | None:
    """Why one factor on all weights of a loss accuses nobody: it may be a coefficient that is meant."""
    if not _may_be_meant(case, data):
        return None
    if added := _added(case):
        losses = f"{added:g} losses{' on average' if added % 1 else ''}"
        return (
            f"each backward pass adds up {losses}, which weigh {added:g} times as much as one mean over all their "
            "tokens: right where these are tasks of their own, too much where they are parts of one batch. "
            "gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) on each task tells"
        )
    if number := _before_each(case):
        num = case.pattern.factor / number
        return (
            f"each backward pass adds up {num:g} losses, with {number:g} x before the mean of each, which weigh "
            f"{case.pattern.factor:.6g} times as much as one mean over all their tokens: right where these are tasks "
            "of their own with that coefficient. gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., "
            "coefficient=...) on each task tells"
        )
    if times := _counted_as_one(case, data):
        return (
            f"each backward pass adds up several losses, of {times:.6g} times as many tokens as the largest of them, "
            "by whose tokens all are divided: right where these are heads or tasks of their own, too much where they "
            "are parts of one batch. gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) on each "
            "tells"
        )
    wrong = "a wrong normaliser" if case.culprit.kind == "loss" else "the average over ranks is one division too many"
    return (
        f"the loss enters backward with x {case.pattern.factor:.6g}: whether this is a coefficient that is meant "
        f"(beside other losses, or for a temperature) or {wrong} is not known. "
        "gradcheck_dist.mark_loss(loss_sum, num_tokens) on the loss before its coefficient tells"
    )


def _may_be_meant(case: Case, data: StepData) -> bool:
    """Whether a common factor at the loss may be a coefficient: other losses stand beside it, or targets are soft."""
    culprit = case.culprit
    if case.pattern.kind != "uniform":
        return False
    if culprit.unrecorded:  # lines that divide behind the loss may have the wrong number as well
        behind = culprit.kind == "loss" and (bool(_added(case)) or _by_temperature(case, data))
        return behind or bool(_counted_as_one(case, data))
    if culprit.kind != "loss":
        # Losses that are 1/R of what an average over R ranks asks for: so would a coefficient of that number be.
        average = case.reduce is not None and case.recorded and case.everywhere
        return average and is_round(case.pattern.factor) and _beside_others(case, data)
    counted = case.context.contributions.by_key.values()
    if all(c.loss is not None and c.loss.op == SOFT_TARGETS for c in counted):
        # Distillation is multiplied by the temperature's square, and more.
        return not _adds_up_means(case, data) or _by_temperature(case, data)
    if _added(case) or _before_each(case) or _labels_alone(case) or _between_passes(case, data):
        return True
    if _of_contrasts(case):
        return True
    return _beside_others(case, data) or bool(_counted_as_one(case, data))


def _between_passes(case: Case, data: StepData) -> bool:
    """Whether a factor is a number that people write and none of passes and ranks, beside passes whose losses count
    nothing: tasks that go backward one by one (a generator's adversary, then a classifier) have coefficients, too."""
    counted = case.context.contributions
    if not is_round(case.pattern.factor) or is_of_degrees(case.pattern.factor, counted):
        return False
    for rank, coordinate in counted.coordinate.items():
        events = data.events.get(rank, [])
        known = {e.loss_id for e in events if isinstance(e, Loss) and e.num_tokens is None}
        uncounted = {
            (coordinate, e.accumulation_step, e.microbatch)
            for e in events
            if isinstance(e, LossGradient) and e.num_tokens is None and e.loss_id in known
        }
        if not uncounted - counted.by_key.keys():
            return False
    return bool(counted.coordinate)


def _of_contrasts(case: Case) -> bool:
    """Whether a factor is a number that people write and none of passes and ranks, at losses whose labels are the same
    numbers in every batch: each row picks its own column, and what is divided by a temperature is often multiplied by
    it, or by twice it, again."""
    counted = case.context.contributions
    labels = [one.label_hash is not None and not tell_batches(one) for one in counted.by_key.values()]
    factor = case.pattern.factor
    return bool(labels) and all(labels) and is_round(factor) and not is_of_degrees(factor, counted)


def _adds_up_means(case: Case, data: StepData) -> bool:
    """Whether each pass of one loop is a mean over its tokens that nothing multiplies, and their sum is too large by
    as many as there are passes, or ranks: no coefficient stands there."""
    counted = case.context.contributions
    whole = all(same(mean, 1) for mean in _means(case, data))
    return whole and case.pattern.factor > 1 and is_of_degrees(case.pattern.factor, counted) and one_loop(data, counted)


def _means(case: Case, data: StepData) -> list[float]:
    """What multiplies each pass's mean over its tokens, but for a loss scale."""
    scales = {e.scale for of_rank in data.events.values() for e in of_rank if isinstance(e, AmpUnscale)} or {1.0}
    counted = case.context.contributions.by_key.values()
    return [(one.weight or 0.0) * (one.num_tokens or 0) / scale for one in counted for scale in scales]


def _by_temperature(case: Case, data: StepData) -> bool:
    """Whether what is too much may be a temperature's square before losses of soft targets: it stands before each
    pass's mean, or is the square of a whole number, which a division by as many passes or ranks would hide there."""
    counted = case.context.contributions.by_key.values()
    factor = case.pattern.factor
    if not 1 < factor < 1.01 * HOTTEST**2 or not all(
        one.loss is not None and one.loss.op == SOFT_TARGETS for one in counted
    ):
        return False
    near = max(SAME, case.pattern.tolerance)
    return all(same(mean, factor, near) for mean in _means(case, data)) or same(factor, round(sqrt(factor)) ** 2, near)


def _labels_alone(case: Case) -> bool:
    """Whether the labels' own part is weighed right, where more is added for all classes: a penalty, and no smoothing
    that takes from the labels what it gives to the others."""
    shares = [c.gradient.label_share if c.gradient else None for c in case.context.contributions.by_key.values()]
    near = max(SAME, case.pattern.tolerance)
    return bool(shares) and all(share is not None and abs(case.pattern.factor * share - 1) <= near for share in shares)


def _beside_others(case: Case, data: StepData) -> bool:
    """Whether a factor may be a coefficient, since other losses stand beside all that count tokens, or several of these
    with coefficients of their own, which the whole may be divided by. Above 1 it is no number of passes and ranks."""
    counted = case.context.contributions
    gradients = [c.gradient for c in counted.by_key.values()]
    if case.pattern.factor > 1:
        in_sum = all(one is not None and _has_number_in_sum(one) for one in gradients)
        exact = max(EXACT, case.pattern.tolerance)
        told = case.context.as_written or is_of_degrees(case.pattern.factor, counted, exact)
        return in_sum and not told and not _bare_sums(case, data)
    beside = all(one is not None and one.other_losses > 0 for one in gradients)
    if not case.pattern.factor > 0 or not (beside or case.context.as_written):
        return False
    each = counted.by_key.values()
    if all(_divided_by_all_tokens(one, counted) for one in each):
        return False
    return not is_of_degrees(case.pattern.factor, counted) or not all(_multiplied_as_a_whole(one, case) for one in each)


def _has_number_in_sum(one: LossGradient) -> bool:
    """Whether some number stands before a loss's mean in a sum of several, or may: what tensors that weigh a stack of
    losses multiply each by is not told."""
    if not one.whole:
        return one.other_losses > 0
    return not same(one.weight * (one.num_tokens or 0) / one.whole, 1)


def _bare_sums(case: Case, data: StepData) -> bool:
    ranks = {coordinate: rank for rank, coordinate in case.context.contributions.coordinate.items()}.values()
    passes = (pairs for rank in ranks for pairs in losses_of_rank(data.events.get(rank, [])).values())
    return are_bare_sums(chain.from_iterable(passes))


def _multiplied_as_a_whole(one: Contribution, case: Case) -> bool:
    """Whether nothing stands before a loss's mean in its sum, or a coefficient that was taken away, so that the factor
    is the whole sum's; not as a mean of losses has one, which divides by all their coefficients."""
    gradient = one.gradient
    if gradient is None or not gradient.whole or gradient.sum_before is None:
        return False
    bare = same(gradient.weight * (gradient.num_tokens or 0) / gradient.whole, 1)
    return (bare or case.context.as_written) and not same(case.pattern.factor * gradient.sum_before, 1)


def _divided_by_all_tokens(one: Contribution, counted: Contributions) -> bool:
    """Whether one number alone multiplies a loss in its sum, 1 / the tokens of all ranks, in the pass or in the step:
    no coefficient is written there."""
    gradient, loss = one.gradient, one.loss
    if gradient is None or loss is None or gradient.multipliers is None or not gradient.num_tokens:
        return False
    divided = [1 / value if value else value for value in gradient.divisors or ()]
    numbers = [*gradient.multipliers, *divided]
    number = gradient.weight / (gradient.whole or 1.0)
    if loss.reduction == "mean":
        number *= gradient.num_tokens
    if None in numbers:
        known = prod(value for value in numbers if value is not None)
        numbers[numbers.index(None)] = number / known if known else 0.0
    written = [value for value in numbers if value is not None and not same(value, 1)]
    if None in numbers or not same(prod(written), number):
        return False
    of_pass = [other.num_tokens or 0 for key, other in counted.by_key.items() if key[1:] == one.key[1:]]
    if loss.reduction == "mean":  # of which the tokens of its own make the sum, apart or in one number with the others
        rest = [value for value in written if not same(value, gradient.num_tokens)]
        if len(rest) == len(written) and len(set(of_pass)) == 1:
            return False  # a share of equal counts is 1 / ranks, as a coefficient may be
        written = rest if len(rest) < len(written) else [value / gradient.num_tokens for value in written]
    return len(written) == 1 and any(same(written[0] * count, 1) for count in (sum(of_pass), counted.num_tokens or 0))


def _added(case: Case) -> float:
    """How many losses each pass adds up, or a pass on average, each a mean of its own: tasks (heads, start and end of a
    span, one of which a rank may lack), or chunks of one batch whose means should have been averaged. 0 where that is
    not what the factor says."""
    num = case.context.contributions.losses_per_pass
    return num if num > 1 and abs(case.pattern.factor / num - 1) <= max(SAME, case.pattern.tolerance) else 0.0


def _before_each(case: Case) -> float:
    """The number that each of several losses of a pass is multiplied by in their sum, as a contrastive loss is by its
    temperature, where all weights are right but for it, and for the number of losses. Of what they are divided by, one
    that makes whole means of some of them each (two contrastive losses, both ways each); where they are stacked, no
    number is told. 0 where that is not so."""
    counted = case.context.contributions.by_key.values()
    numbers = set[float]()
    for one in counted:
        gradient = one.gradient
        if one.num_losses < 2 or gradient is None or not gradient.whole:
            return 0.0
        before = gradient.weight * (gradient.num_tokens or 0) / gradient.whole
        written = [value for value in gradient.multipliers or () if value is not None]
        divisors = gradient.divisors or ([] if gradient.multipliers or not before else [round(1 / before)])
        written += [1 / value for value in divisors if value and _makes_means(value, one.num_losses)]
        numbers |= {value for value in written if same(value, before)}
    number = numbers.pop() if len(numbers) == 1 else 0.0
    total = number * case.context.contributions.losses_per_pass
    right = number and not same(number, 1) and total
    return number if right and abs(case.pattern.factor / total - 1) <= max(SAME, case.pattern.tolerance) else 0.0


def _makes_means(divisor: float, num_losses: int) -> bool:
    """Whether so many losses are several means of `divisor` losses each."""
    return 1 < divisor < num_losses and num_losses % divisor == 0


def _counted_as_one(case: Case, data: StepData) -> float:
    """How many times as many tokens as the largest loss all have that each pass adds up, where they, or lines behind
    them, divide by that one's: heads that predict further tokens each lack some, and a mean over all rows of a batch
    holds those that a threshold leaves out (FixMatch). 0 where that is not what the factor says."""
    if not ((case.culprit.unrecorded or case.culprit.kind == "loss") and case.everywhere and case.pattern.factor > 1):
        return 0.0
    tokens = Counter[int]()
    place = case.context.contributions.coordinate
    for rank in {coordinate: rank for rank, coordinate in place.items()}.values():
        for pairs in losses_of_rank(data.events.get(rank, [])).values():
            counts = [gradient.num_tokens or 0 for gradient, loss in pairs if loss is not None]
            tokens.update(dict(enumerate(sorted(counts, reverse=True))))
    if len(tokens) < 2 or not tokens[0]:
        return 0.0
    times = tokens.total() / tokens[0]
    return times if abs(case.pattern.factor / times - 1) <= max(SAME, case.pattern.tolerance) else 0.0
