"""Losses whose weight is one of a few numbers, another from pass to pass without a system: a batch's own coefficient.

Where each batch comes from one source or one task, its loss is multiplied by that source's weight. No normaliser that
is wrong does this: what divides by a count gives as many numbers as there are counts, and what depends on the
accumulation step or the rank is the same in each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.losses.weighted_tokens import drop_of_constants
from gradcheck_dist.diagnosis.weights.cells import loss_rounding
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

ALIKE = 1e-3
"""Relative; coefficients that somebody wrote lie further apart. Of losses in a coarser type, its rounding:"""
SHARE = 2
"""So many contributions a number at least, on average: else any numbers would be few."""

POWERS = (1, -1, 2, -2)
LEAST_COUNTS = 3
"""Of two, any two numbers are near to powers."""

MEANS, COUNTED_APART = "GS301", frozenset({"GS302", "GS305"})

Values = Mapping[ContributionKey, float]
Reading = Callable[["StepVerdict", Contribution], float]


def leave_coefficients_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no loss, nor what follows all losses, of factors that are such coefficients."""
    found = [finding for verdict in verdicts for finding in verdict.findings]
    at_loss = [one for one in found if one.code == "GS000" and one.first_event and one.first_event.kind == "loss"]
    if not at_loss or any(one.code in COUNTED_APART for one in found):
        return
    counted = [verdict for verdict in verdicts if verdict.contributions.by_key and not verdict.context.relative]
    alike = max([ALIKE, *(loss_rounding(verdict.contributions) for verdict in counted)])
    if _are_counts_of_ranks(counted):
        _tell_counts(counted)
        return
    if not any(
        len(_apart([one.weight or 0.0 for one in verdict.contributions.by_key.values()], alike)) > 1
        for verdict in counted
    ):
        return  # sums over tokens, however many each pass holds
    as_they_are = [_values(verdict, _at_loss) for verdict in counted]
    levels = _levels([value for values in as_they_are for value in values.values()], alike)
    if levels and not _unsystematic([_as_levels(values, levels) for values in as_they_are]):
        return  # sums that follow ranks or passes, and are divided behind the loss by another count in each step
    means = any(one.code == MEANS for one in found)
    for reading in (_of_mean,) if means else (_of_mean, _of_token):
        steps = [_values(verdict, reading) for verdict in counted]
        levels = _levels([value for values in steps for value in values.values()], alike)
        if levels and _follow_counts(counted, steps, alike):
            return
        if levels and _unsystematic([_as_levels(values, levels) for values in steps]):
            least = levels[0] if levels[0] > 0 else 1.0
            told = ", ".join(f"{level / least:.4g}" for level in levels[:5]) + (", ..." if len(levels) > 5 else "")
            for verdict in counted:
                drop_of_constants(
                    verdict,
                    f"losses of different passes weigh {told} to one another, now these and now those, and no count "
                    "tells why: coefficients of their own (by source or task) may be meant, and what all of them "
                    "together should come to is not known. gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., "
                    "coefficient=...) on each loss tells",
                    spare=MEANS,
                )
            return


def _are_counts_of_ranks(counted: Sequence[StepVerdict]) -> bool:
    """Whether all passes of a data rank's step divide by one whole number, which is larger than the tokens that enter
    their losses, but not by much: labels before a shift, padding."""
    divided = [verdict.own_divisors for verdict in counted]
    found = [of_rank for numbers in divided if numbers is not None for of_rank in numbers.by_rank.values()]
    several = all(verdict.context.num_accumulation > 1 for verdict in counted)
    return (
        bool(found) and several and None not in divided and all(len(one) == 1 and one[0].counts_more for one in found)
    )


def _tell_counts(counted: Sequence[StepVerdict]) -> None:
    """Say by which counts the losses of each data rank are divided, where these are found to be wrong."""
    for verdict in counted:
        assert verdict.own_divisors is not None
        ranks = sorted(verdict.own_divisors.by_rank.items())
        told = in_short([f"{one.value:.6g} for {one.tokens}" for _, (one,) in ranks])
        for finding in verdict.findings:
            if finding.code == "GS000" and finding.first_event is not None and finding.first_event.kind == "loss":
                finding.explanation += (
                    f" Each data rank divides its losses by a count of its own, of more tokens than enter them: {told}."
                )
                finding.fix = (
                    "Divide by the tokens that enter the losses, of all ranks (times their number where the reduction "
                    "averages), and look what was counted besides: padding, or labels before a shift."
                )


def _at_loss(_: StepVerdict, one: Contribution) -> float:
    return one.weight or 0.0


def _of_mean(verdict: StepVerdict, one: Contribution) -> float:
    return (one.weight or 0.0) * (one.num_tokens or 0) * verdict.context.num_accumulation


def _of_token(verdict: StepVerdict, one: Contribution) -> float:
    return (one.weight or 0.0) * (verdict.contributions.num_tokens or 0)


def _values(verdict: StepVerdict, reading: Reading) -> dict[ContributionKey, float]:
    return {key: reading(verdict, one) for key, one in verdict.contributions.by_key.items()}


def _follow_counts(verdicts: Sequence[StepVerdict], steps: Sequence[Values], alike: float) -> bool:
    """Whether one power of its tokens, of those of its rank, or of those of its rank's last pass, makes each number of
    a step: few counts make few numbers, too."""
    own = [{key: one.num_tokens or 0 for key, one in verdict.contributions.by_key.items()} for verdict in verdicts]
    readings = (own, [_of_rank(of_step) for of_step in own], [_of_last_pass(of_step) for of_step in own])
    return any(_powers_make(counts, steps, alike) for counts in readings)


def _of_last_pass(counts: Mapping[ContributionKey, int]) -> dict[ContributionKey, int]:
    last = {key[0]: counts[key] for key in sorted(counts)}
    return {key: last[key[0]] for key in counts}


def _of_rank(counts: Mapping[ContributionKey, int]) -> dict[ContributionKey, int]:
    of_rank: dict[int, int] = defaultdict(int)
    for key, count in counts.items():
        of_rank[key[0]] += count
    return {key: of_rank[key[0]] for key in counts}


def _powers_make(counts: Sequence[Mapping[ContributionKey, int]], steps: Sequence[Values], alike: float) -> bool:
    if not all(all(of_step.values()) for of_step in counts):
        return False
    if len({count for of_step in counts for count in of_step.values()}) < LEAST_COUNTS:
        return False
    return any(
        all(
            len(_apart([value / of_step[key] ** power for key, value in values.items()], alike)) == 1
            for values, of_step in zip(steps, counts, strict=True)
        )
        for power in POWERS
    )


def _levels(values: Sequence[float], alike: float) -> list[float]:
    """The numbers that occur, the least first; none where there are too many of them, or one alone."""
    levels = _apart(values, alike)
    return levels if 1 < len(levels) <= len(values) // SHARE else []


def _apart(values: Sequence[float], alike: float) -> list[float]:
    levels: list[float] = []
    for value in sorted(values):
        if not levels or abs(value - levels[-1]) > alike * abs(value):
            levels.append(value)
    return levels


def _as_levels(values: Values, levels: Sequence[float]) -> dict[ContributionKey, int]:
    return {key: min(range(len(levels)), key=lambda i: abs(levels[i] - value)) for key, value in values.items()}


def _unsystematic(steps: Sequence[Mapping[ContributionKey, int]]) -> bool:
    """Whether the numbers change from pass to pass: in more than one of a step's passes and within most steps, there
    either apart on ranks or to and fro (a window that was left in brings one number first, then the other)."""
    slots: dict[ContributionKey, set[int]] = defaultdict(set)
    for values in steps:
        for key, level in values.items():
            slots[key].add(level)
    changing = sum(len(levels) > 1 for levels in slots.values())
    mixed = sum(len(set(values.values())) > 1 for values in steps)
    return changing > 1 and 2 * mixed >= len(steps) and any(_to_and_fro(values) for values in steps)


def _to_and_fro(values: Mapping[ContributionKey, int]) -> bool:
    of_ranks: dict[int, list[int]] = defaultdict(list)
    for key in sorted(values):
        of_ranks[key[0]].append(values[key])
    orders = list(of_ranks.values())
    if any(order != orders[0] for order in orders):
        return True
    changes = sum(one != other for one, other in zip(orders[0], orders[0][1:], strict=False))
    return changes >= len(set(orders[0])) > 1
