"""Losses that stand in a sum: what is written before one there is its coefficient, and no part of the pass's weight.

    loss = 2 * F.cross_entropy(classes, labels) + 5 * F.l1_loss(boxes, targets)
    (loss / accumulation_steps).backward()

The gradient that arrives at the sum tells what the pass weighs, and the one that arrives at a loss, over that, the
number before its mean. One number in all passes is a coefficient where it is none of those that passes and ranks are
divided by, which may be a normaliser that stands at the loss itself, or where the loss is multiplied by it, it is below
1 and no equal share of the tokens: normalisers are divided by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gradcheck_dist.diagnosis.weights.bare_sums import are_bare_sums
from gradcheck_dist.diagnosis.weights.cells import MAX_SPREAD
from gradcheck_dist.diagnosis.weights.degrees import SAME, degrees_of, is_of_degrees, same
from gradcheck_dist.events import Event, Loss, LossGradient
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions, losses_of_rank
from gradcheck_dist.ledger.solve import EPSILON

HALF = 0.5
EXACT = 1e-5
"""Relative; how near to a count a number must be that is made of it."""
COUNTED, MOST_TOLD = 1e-6, 50_000
"""Relative; how near a number next to 1 is to one that counts make, and up to how many tokens chance hits none."""
DECLARE = (
    "gradcheck_dist.mark_loss(loss_sum, num_tokens, coefficient=...) on it, and with term=... on the others, tells"
)
LossOfPasses = dict[ContributionKey, tuple[LossGradient, Loss | None]]


@dataclass
class Written:
    """The contributions as if nothing stood before the loss in its sum, and the `coefficient` that does.

    `is_certain`: it cannot be a normaliser of the loss's own. `may_divide`: it may be a wrong one, where the weights
    come out wrong without it, too. `of_sum`: it stands before a sum over tokens, and not before their mean.
    `counted`: what stands before a loss's mean and is one over its tokens in this step, or ranks or passes over
    them. `uncounted`: what stands before one that divides by each pass's own tokens, and is as many as ranks or passes,
    so that a sum of the counts may be missing. `num_parts`: how often a pass evaluates the same lines, where nothing
    divides by that. `in_place`: the number is one over ranks or passes, and the program multiplies by it: where the
    weights come out right with it, it may be a coefficient beside which a division lacks.
    """

    contributions: Contributions
    coefficient: float
    is_certain: bool
    may_divide: bool
    of_sum: bool
    counted: float | None = None
    uncounted: float | None = None
    divided: float | None = None
    num_parts: int = 1
    in_place: bool = False

    @property
    def in_place_reason(self) -> str:
        return (
            f"{self.coefficient:.4g} x stands before the loss in a sum of several: all weights are right where that "
            f"divides by ranks or passes, and x {1 / self.coefficient:.4g} too large where it is a coefficient. "
            f"{DECLARE}"
        )

    @property
    def remark(self) -> str:
        if self.coefficient == 1:
            return "several losses stand in a sum: judged by one that nothing multiplies there"
        return f"{self.coefficient:.6g} x stands before the loss in a sum of several, and is taken for its coefficient"

    @property
    def reason(self) -> str:
        if self.counted is not None:
            return (
                f"{self.counted:.4g} x stands before the mean of a loss in a sum of several, and is one over the "
                "tokens that it counts in the step, or ranks or passes over them: right where that is its coefficient, "
                "and one division too many where a sum was meant. "
                f"{DECLARE}"
            )
        if self.uncounted is not None:
            return (
                f"a loss in a sum of several is divided by the tokens of its own pass, unequal numbers, and multiplied "
                f"by {self.uncounted:.4g}, as many as ranks or passes: right where that is its coefficient, and wrong "
                "where tokens were to be summed over these first. "
                f"{DECLARE}"
            )
        if self.divided is not None:
            return (
                f"a loss in a sum of several is divided there by {self.divided:g}, as many as ranks or passes: right "
                "where that is its coefficient, and one division too many where a mean over these was meant, of which "
                "an average follows. "
                f"{DECLARE}"
            )
        if self.num_parts > 1:
            together = self.coefficient * self.num_parts
            return (
                f"each backward pass adds up {self.num_parts} losses of one line, beside others, and "
                f"{self.coefficient:.4g} x stands before each: right where these are tasks of their own, and x "
                f"{together:.4g} of the mean over them where they are parts of one batch. "
                f"{DECLARE}"
            )
        return (
            f"{self.coefficient:.4g} x stands before the loss in a sum of several: all weights are right where that is "
            "its coefficient, and wrong where it is meant to divide by ranks, passes or tokens. "
            f"{DECLARE}"
        )

    def explains(self, ratio: float) -> bool:
        """Whether what is wrong without a number before a sum, which is no 1 / tokens, is one of passes and ranks."""
        by_degrees = not same(ratio, 1) and is_of_degrees(ratio, self.contributions)
        return self.of_sum and self.coefficient > HALF and by_degrees


def as_written(contributions: Contributions, events: Mapping[int, Sequence[Event]]) -> list[Written]:
    """The contributions without the coefficients of their losses, as means and as sums. Empty where the losses stand in
    no sum, or something else than one number in all passes stands before each of them, or nothing before any, or where
    they are sums over the parts of one batch."""
    losses = _losses(contributions, events)
    if losses and are_bare_sums(pair for loss in losses for pair in loss.values()):
        return []
    found = [_without(contributions, losses, of_sum=of_sum) for of_sum in (False, True)] if losses else []
    return [one for one in found if one is not None]


def _without(contributions: Contributions, losses: Sequence[LossOfPasses], *, of_sum: bool) -> Written | None:
    before = [_before(loss, of_sum=of_sum) for loss in losses]
    numbers = [one for one in before if one is not None]
    if len(numbers) < len(before):
        return None
    near = _rounding(losses)
    if all(same(one, numbers[0], near) for one in numbers) and (len(numbers) > 1 or same(numbers[0], 1, near)):
        return None  # tasks, or parts of one batch: all weigh alike
    means = [all(loss is not None and loss.reduction == "mean" for _, loss in one.values()) for one in losses]
    index = max(range(len(losses)), key=lambda index: (same(numbers[index], 1, near), means[index] != of_sum, -index))
    main = {key: gradient for key, (gradient, _) in losses[index].items()}
    next_to_one = same(numbers[index], 1) and not same(numbers[index], 1, near)
    if not next_to_one:
        number = 1.0 if same(numbers[index], 1) else numbers[index]
    else:
        number = 1.0 if _is_of_counts(numbers[index], contributions) else numbers[index]
    by_key = {
        key: replace(one, num_tokens=main[key].num_tokens, weight=main[key].weight / number, spread=0.0)
        for key, one in contributions.by_key.items()
    }
    by_key |= {
        key: replace(by_key[key], num_tokens=0) for key, one in contributions.by_key.items() if one.num_tokens == 0
    }
    unequal = len({one.num_tokens for one in main.values()}) > 1
    product = all(_is_product(one, number, contributions) for one in main.values())
    own = same(number, 1) or product or not is_of_degrees(number, contributions)
    part = 1 / number if 0 < number < 1 else 0.0
    may_divide = of_sum or (number < 1 and same(part, round(part)) and not product)
    with_numbers = [] if of_sum else list(zip(losses, numbers, strict=True))
    counted = next((one for loss, one in with_numbers if _is_of_tokens(loss, one, contributions)), None)
    uncounted = next((one for loss, one in with_numbers if _divides_apart(loss, one, contributions)), None)
    divided = _divided_alone(losses, index, contributions)
    num_parts = _num_parts(losses, numbers)
    uneven = num_parts == 1 and _is_uneven_mean(numbers)
    num_parts = 1 if same(numbers[index] * num_parts, 1) else num_parts
    certain = (means[index] != of_sum or unequal) and own and counted is uncounted is divided is None
    certain &= num_parts == 1 and not uneven and not next_to_one
    aimed_at = replace(contributions, by_key=by_key)
    in_place = not of_sum and all(_is_share(one, number, contributions) for one in main.values())
    return Written(aimed_at, number, certain, may_divide, of_sum, counted, uncounted, divided, num_parts, in_place)


def _rounding(losses: Sequence[LossOfPasses]) -> float:
    """How near, relative, a number before a loss is to one that is read there: learned weights are near 1 at first."""
    dtypes = {event.dtype if event is not None else "bfloat16" for loss in losses for _, event in loss.values()}
    return min(max([EXACT, *(4 * EPSILON.get(dtype, SAME) for dtype in dtypes)]), SAME)


def _is_of_counts(number: float, contributions: Contributions) -> bool:
    """Whether a number next to 1 is the tokens of the step over another whole number: a count that is off by a few."""
    tokens = contributions.num_tokens or 0
    counted = tokens / number
    return 0 < tokens < MOST_TOLD and abs(counted - round(counted)) <= COUNTED * tokens


def _is_uneven_mean(numbers: Sequence[float]) -> bool:
    """Whether several losses, but not all, are divided by as many as there are: a mean, but for the others' weights."""
    shares = [same(number * len(numbers), 1) for number in numbers]
    return 1 < sum(shares) < len(numbers)


def _num_parts(losses: Sequence[LossOfPasses], numbers: Sequence[float]) -> int:
    """How often a pass evaluates the same losses one after the other, with the same numbers before them: microbatches
    that go backward together."""
    signs: list[tuple[object, ...]] = []
    for loss, number in zip(losses, numbers, strict=True):
        _, event = next(iter(loss.values()))
        site = event.site if event is not None else None
        signs.append((site and (site.file, site.line, site.called_from), event and event.op, round(number, 6)))
    for period in range(1, len(signs) // 2 + 1):
        if len(signs) % period == 0 and all(sign == signs[at % period] for at, sign in enumerate(signs)):
            return len(signs) // period
    return 1


def _is_of_tokens(loss: LossOfPasses, number: float, contributions: Contributions) -> bool:
    """Whether a number before a loss that takes its mean is 1, ranks or passes over all tokens of this loss."""
    tokens = sum(gradient.num_tokens or 0 for gradient, _ in loss.values())
    means = all(event is not None and event.reduction == "mean" for _, event in loss.values())
    degrees = [degree for degree in {1, *degrees_of(contributions)} if degree < tokens]
    return means and any(abs(number * tokens / degree - 1) <= EXACT for degree in degrees)


def _divides_apart(loss: LossOfPasses, number: float, contributions: Contributions) -> bool:
    """Whether a loss is divided by the tokens of its own pass in the sum, other numbers in other passes, and multiplied
    by ranks or passes."""
    told = [gradient for gradient, _ in loss.values()]
    unequal = len({one.num_tokens for one in told}) > 1
    divided = all(_is_divided_by_its_tokens(gradient, event) for gradient, event in loss.values())
    return unequal and divided and number > 1 and is_of_degrees(number, contributions)


def _is_divided_by_its_tokens(one: LossGradient, event: Loss | None) -> bool:
    """Of a loss that weighs as a mean: whether its own tokens stand among what it is divided by, or a number that
    nobody has read (it lies on a device) must be they, since the loss itself takes no mean."""
    divisors = one.divisors or ()
    if None in divisors and event is not None and event.reduction != "mean":
        return True
    return any(by is not None and same(by, one.num_tokens or 0) for by in divisors)


def _divided_alone(losses: Sequence[LossOfPasses], index: int, contributions: Contributions) -> float | None:
    """The number of ranks or passes that one of the other losses is divided by in each pass, by itself: as many losses
    as it says are averaged by it."""
    for degree in sorted(degrees_of(contributions) - {1}):
        by_it = [
            number
            for number, loss in enumerate(losses)
            if all(any(by is not None and same(by, degree) for by in one.divisors or ()) for one, _ in loss.values())
        ]
        if by_it and by_it != [index] and len(by_it) != degree:
            return float(degree)
    return None


def _is_product(one: LossGradient, number: float, contributions: Contributions) -> bool:
    """Whether a number below 1 is one that the loss is multiplied by in its sum, and no equal share of the tokens."""
    if number >= 1 or any(same(number * degree, 1) for degree in degrees_of(contributions)):
        return False
    return any(value is not None and same(value, number) for value in one.multipliers or ())


def _is_share(one: LossGradient, number: float, contributions: Contributions) -> bool:
    """Whether a number is one over ranks or passes, and one that the loss is multiplied by in its sum, not divided."""
    if not any(same(number * degree, 1) for degree in degrees_of(contributions) - {1}):
        return False
    return any(value is not None and same(value, number) for value in one.multipliers or ())


def _losses(contributions: Contributions, events: Mapping[int, Sequence[Event]]) -> list[LossOfPasses]:
    """The losses of each pass that count tokens, in order; none where passes have other numbers of them, or one of them
    has no single weight, or stands in no sum."""
    if not all(one.gradient is not None and one.gradient.whole for one in contributions.by_key.values()):
        return []
    ranks = {one.loss_rank for one in contributions.by_key.values() if one.loss_rank is not None}
    losses = {rank: losses_of_rank(list(events.get(rank, ()))) for rank in ranks}
    found: list[LossOfPasses] = []
    for key, one in contributions.by_key.items():
        of_rank = losses[one.loss_rank] if one.loss_rank is not None else {}
        of_pass = sorted(of_rank.get((key[1], key[2]), ()), key=lambda pair: pair[0].loss_id)
        found = found or [{} for _ in of_pass]
        if len(of_pass) != len(found) or not all(_in_sum(gradient) for gradient, _ in of_pass):
            return []
        for loss, pair in zip(found, of_pass, strict=True):
            loss[key] = pair
    return found


def _in_sum(one: LossGradient) -> bool:
    high, low = one.weight_max, one.weight_min
    alike = high is None or low is None or abs(high - low) <= MAX_SPREAD * abs(high)
    return bool(one.whole and one.weight and one.num_tokens) and alike and not one.computed


def _before(loss: LossOfPasses, *, of_sum: bool) -> float | None:
    """The number before a loss's mean over its tokens, or before their sum, in the sum of losses; None where that is
    another one in other passes."""
    told = [one for one, _ in loss.values()]
    numbers = [one.weight / (one.whole or 1.0) * (1 if of_sum else one.num_tokens or 0) for one in told]
    return numbers[0] if all(same(number, numbers[0]) for number in numbers) else None
