"""Losses that count no tokens and add up several means or sums over elements: which of these tells what a pass weighs.

A distance plus 0.3 of another, a reconstruction plus a divergence, energies and forces. What stands before a term in
its sum is a coefficient, and right as it is written. What multiplies the sum is the pass's weight: a term that is
nothing but a mean over its own elements or rows there stands for the whole. Where all terms are means with
coefficients, one of them does without its own, unless that may be what passes or ranks are divided by. And where all
are sums that the program divides in the sum itself, one that fewest numbers multiply does: another may lack the
division.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import msgspec

from gradcheck_dist.diagnosis.losses.elements import weights_of_passes
from gradcheck_dist.diagnosis.weights.degrees import degrees_of
from gradcheck_dist.events import Backward, Event, LossTerm, ReducedGradient
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import StepData

SAME = 1e-3
PARTS = 2
REDUCED = sorted({*ReducedGradient.__struct_fields__} - {*Event.__struct_fields__})
Term = dict[ContributionKey, LossTerm]


class MainTerm(NamedTuple):
    """Contributions whose gradients tell of the term that stands for the whole, and what a pass's loss is, in words."""

    contributions: Contributions
    words: str


def main_term(data: StepData, contributions: Contributions) -> MainTerm | None:
    """The term that tells what each pass weighs. None where passes are no sums of the same terms, where what stands
    before a term changes from pass to pass, and where none stands for the whole. It may change beside a mean that
    nothing multiplies where the program was given gradients in between, by whose norms it weighs the others."""
    terms = _terms(data, contributions)
    main = next((term for term in terms if _is_mean(term, contributions)), None)
    if _share_a_number(terms):
        return None
    if not terms or not (all(_is_written(term, contributions) for term in terms) or (main and _was_given(data))):
        return None
    if main is not None and _may_average_terms(terms, contributions):
        return None
    if main is not None:
        return MainTerm(_told_by(main, contributions), _in_words(terms, main))
    if all(event.reduced_by == "sum" for term in terms for event in term.values()):
        main = min(terms, key=_num_factors)
        return MainTerm(_told_by(main, contributions), _in_words(terms, main))
    without = [_without_coefficient(term, contributions) for term in terms]
    found = without[0] if None not in without else None
    return MainTerm(found, _in_words(terms, terms[0])) if found is not None else None


def _was_given(data: StepData) -> bool:
    """Whether each rank's lines asked for gradients of the model, which torch.autograd.grad hands to them."""
    return all(any(isinstance(e, Backward) and e.returned for e in of_rank) for of_rank in data.events.values())


def _without_coefficient(term: Term, contributions: Contributions) -> Contributions | None:
    """As if nothing stood before a mean in its sum; None where it is no mean, or a division may stand there."""
    degrees = degrees_of(contributions) - {1}
    for of in _before_means(term, contributions):
        number = abs(next(iter(of.values())))
        divisions = {times for degree in degrees for times in (degree, 1 / degree)}
        if number and _one_number(of.values()) and not any(abs(number - one) <= SAME * one for one in divisions):
            # Nobody is accused by them: other numbers that come to as much may stand before the term.
            freed = {key: _over(event, number) for key, event in term.items()}
            return _told_by(freed, contributions)
    return None


def _over(event: LossTerm, number: float) -> LossTerm:
    weights = {name: getattr(event, name) for name in ("reduced_weight", "element_min", "element_max")}
    fields = {name: weight / number for name, weight in weights.items() if weight is not None}
    return msgspec.structs.replace(event, mean_weight=None, compares=False, **fields)


def _terms(data: StepData, contributions: Contributions) -> list[Term]:
    """The terms that every pass has, in order; none where passes differ in them."""
    found: dict[int, Term] = defaultdict(dict)
    for key, contribution in contributions.by_key.items():
        rank = contribution.loss_rank
        for event in data.events.get(rank, ()) if rank is not None else ():
            if isinstance(event, LossTerm) and event.whole and (event.accumulation_step, event.microbatch) == key[1:]:
                found[event.ordinal][key] = event
    terms = [found[ordinal] for ordinal in sorted(found)]
    alike = all(
        term.keys() == contributions.by_key.keys() and len({e.op for e in term.values()}) == 1 for term in terms
    )
    return terms if alike else []


def _is_written(term: Term, contributions: Contributions) -> bool:
    """Whether one number stands before a term, or before its mean, in every pass's sum."""
    return any(_one_number(of.values()) for of in (_before(term), *_before_means(term, contributions)))


def _is_mean(term: Term, contributions: Contributions) -> bool:
    """Whether a term is, in its sum, a mean over its own elements or rows that nothing multiplies."""
    return any(all(abs(one - 1) <= SAME for one in of.values()) for of in _before_means(term, contributions))


def _share_a_number(terms: list[Term]) -> bool:
    """Whether one number stands before each of several terms of one kind, and is not one over how many they are:
    microbatches that go backward together are divided so, by a wrong number. A coefficient of all would stand once."""
    numbers = [number for term in terms for number in _before(term).values()]
    if len(terms) < PARTS or len({event.op for term in terms for event in term.values()}) > 1:
        return False
    number = abs(numbers[0])
    return _one_number(numbers) and not any(abs(number - meant) <= SAME for meant in (1, 1 / len(terms)))


def _may_average_terms(terms: list[Term], contributions: Contributions) -> bool:
    """Whether a sum of means, none of which has a coefficient, is divided by as many passes or ranks as it has terms:
    the mean of two views' losses, or the division by two accumulation steps."""
    if len(terms) not in degrees_of(contributions) or not all(_is_mean(term, contributions) for term in terms):
        return False
    return all(abs((event.whole or 0.0) * len(terms) - 1) <= SAME for term in terms for event in term.values())


def _before(term: Term) -> dict[ContributionKey, float]:
    return {key: event.weight / (event.whole or 1.0) for key, event in term.items()}


def _before_means(term: Term, contributions: Contributions) -> list[dict[ContributionKey, float]]:
    """What stands before each pass's mean over entries, over elements and over rows, as far as each is told of."""
    whole = {key: event.whole or 1.0 for key, event in term.items()}
    told = weights_of_passes(_told_by(term, contributions))
    return [{key: weight / whole[key] for key, weight in of.items()} for of in told]


def _told_by(term: Term, contributions: Contributions) -> Contributions:
    by_key = dict(contributions.by_key)
    for key, event in term.items():
        gradient, fields = by_key[key].gradient, {name: getattr(event, name) for name in REDUCED}
        if gradient is not None:
            by_key[key] = replace(by_key[key], gradient=msgspec.structs.replace(gradient, **fields))
    return replace(contributions, by_key=by_key)


def _num_factors(term: Term) -> int:
    return max(event.num_factors for event in term.values())


def _one_number(values: Iterable[float]) -> bool:
    first, *others = values
    return all(abs(one - first) <= SAME * abs(first) for one in (first, *others))  # NaN is none


def _in_words(terms: list[Term], main: Term) -> str:
    told = []
    for term in (main, *[term for term in terms if term is not main]):
        before = list(_before(term).values())
        number = f"{before[0]:.4g} x " if abs(before[0] - 1) > SAME else ""
        number = number if _one_number(before) else f"{min(before):.4g} to {max(before):.4g} x "
        told.append(number + next(iter(term.values())).op)
    return f"adds up {' and '.join(told)}, as is written there, the first of which tells"
