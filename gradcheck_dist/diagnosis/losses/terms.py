"""Auxiliary loss terms beside the main loss: is each scaled as the main one is?

What follows a loss treats all terms alike, so a term is right when its weight at the loss, over what its declared
coefficient and its own positions ask for, equals that of the main loss. That quotient holds the trainer's own
convention (a loss that carries R because an average follows, a loss scale), which the main loss tells. A term may be a
mean over all its positions, over microbatches or over ranks: every consistent choice is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf

import numpy as np

from gradcheck_dist.diagnosis.causes.case import Case, name_case
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.weights.cells import MATERIAL
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.events import Event
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.expected import OBJECTIVES, expected_weights
from gradcheck_dist.ledger.solve import EPSILON
from gradcheck_dist.ledger.terms import Term, auxiliary_terms

Expected = Mapping[ContributionKey, Fraction]


@dataclass(frozen=True)
class TermVerdict:
    """Cases of terms that are scaled otherwise than the main loss, reasons for which a term cannot be judged, and
    remarks on what stays unknown."""

    cases: list[Case]
    reasons: list[str]
    remarks: list[str]


@dataclass(frozen=True)
class _Fit:
    """All evaluations of a term weigh `factor` times what `objective` over its positions asks for. `adds_copies`: of
    ranks that share a data coordinate (tp), each is one summand of the term."""

    objective: str
    adds_copies: bool
    factor: float
    tolerance: float
    num_tokens: int

    @property
    def is_right(self) -> bool:
        return abs(self.factor - 1) <= self.tolerance


def judge_terms(
    context: StepContext,
    events: Mapping[int, list[Event]],
    contributions: Contributions,
    expected: Expected,
    cases: Sequence[Case],
    inferred: Container[str] = (),
) -> TermVerdict:
    """Judge the auxiliary terms of a step.

    Args:
        expected: weights per token of the main loss.
        cases: what was found wrong with the main loss.
        inferred: terms that nobody declared, of which other steps tell (inferred_terms.py).
    """
    verdict = TermVerdict([], [], [])
    convention = {
        key: contribution.weight / float(expected[key])
        for key, contribution in contributions.by_key.items()
        if contribution.weight and key in expected
    }
    main_is_off = any(case.culprit.kind == "loss" for case in cases)
    wrong: dict[tuple[object, ...], list[tuple[Term, _Fit]]] = defaultdict(list)
    readings: dict[str, list[str]] = defaultdict(list)
    for term in auxiliary_terms(events, contributions):
        if term.name in inferred:
            continue
        fits = list(_fits(term, context, contributions, convention))
        if not fits:
            # Of a term without a declared coefficient nothing is asked, so nothing hangs on it.
            told = verdict.remarks if term.coefficient is None else verdict.reasons
            told.append(
                f"the weights of loss term {term.name} follow no mean over its positions, over microbatches or over "
                "ranks: whether they are meant so is not known"
            )
        elif term.coefficient is None:
            verdict.remarks.append(
                f"loss term {term.name} is scaled alike in all contributions; its absolute scale is not known: "
                "declare it with mark_loss(..., coefficient=)"
            )
        elif any(fit.is_right for fit in fits):
            continue
        elif main_is_off:
            verdict.remarks.append(f"loss term {term.name} cannot be judged until the main loss is mended")
        else:
            site = term.evaluations[0].loss.site
            fit, rivals = _simplest(context, fits)
            wrong[site and (site.file, site.line), round(fit.factor, 4)].append((term, fit))
            for rival in rivals:
                readings[
                    f"off by {fit.factor:.6g} if {_READINGS[fit.adds_copies]}, and by {rival.factor:.6g} if "
                    f"{_READINGS[rival.adds_copies]}; which of these holds is not recorded"
                ].append(term.name)
    verdict.remarks.extend(f"loss term {', '.join(names)}: {words}" for words, names in readings.items())
    verdict.cases.extend(_case(context, together) for together in wrong.values())
    return verdict


def _fits(
    term: Term, context: StepContext, contributions: Contributions, convention: Mapping[ContributionKey, float]
) -> Iterator[_Fit]:
    """The objectives that all evaluations of a term follow up to one factor, the run's own objective first."""
    for every_copy in (False, True) if term.has_copies else (False,):
        tokens = term.tokens(every_copy=every_copy)
        if tokens is None:
            continue
        for name, weights in _objectives(context.objective, tokens, contributions):
            ratios, tolerances = [], []
            for one in term.evaluations:
                if one.key in weights and one.key in convention:
                    asked = float(weights[one.key]) * (term.coefficient or 1.0) * convention[one.key]
                    ratios.append(one.gradient.weight / asked)
                    main = contributions.by_key[one.key].loss
                    dtypes = one.loss.dtype, main.dtype if main is not None else "bfloat16"
                    tolerances.append(MATERIAL + sum(EPSILON.get(dtype, EPSILON["float32"]) for dtype in dtypes))
            if not ratios:
                continue
            middle, tolerance = float(np.median(ratios)), max(tolerances)
            if middle and all(abs(ratio - middle) <= 2 * tolerance * abs(middle) for ratio in ratios):
                yield _Fit(name, every_copy, middle, tolerance, sum(tokens.values()))


_READINGS = {
    False: "ranks with the same data evaluate the same term, and one of them counts",
    True: "the terms of ranks with the same data are added up",
}


def _simplest(context: StepContext, fits: Sequence[_Fit]) -> tuple[_Fit, list[_Fit]]:
    """The fit whose factor has the simplest name, and the first that reads copies otherwise with another factor."""

    def cost(fit: _Fit) -> float:
        names = name_number(fit.factor, context.quantities, max(2 * fit.tolerance, 1e-6))
        return names[0].cost if names else inf

    first_of_each = {fit.adds_copies: fit for fit in reversed(fits)}
    chosen = min((first_of_each[way] for way in sorted(first_of_each)), key=cost)
    rivals = [fit for fit in fits if fit.adds_copies is not chosen.adds_copies]
    apart = [fit for fit in rivals if abs(fit.factor / chosen.factor - 1) > 2 * fit.tolerance]
    return chosen, apart[:1]


def _objectives(
    declared: str, tokens: Mapping[ContributionKey, int], contributions: Contributions
) -> Iterator[tuple[str, Mapping[ContributionKey, Fraction]]]:
    for name in sorted(OBJECTIVES, key=lambda name: name != declared):
        if name != "sum" or declared == "sum":
            yield name, expected_weights(name, tokens)
    main = {key: contributions.by_key[key].num_tokens or 0 for key in tokens if key in contributions.by_key}
    if total := sum(main.values()):
        # A mean over each microbatch's positions, that weighs as much as the main loss's tokens there.
        yield (
            "main-token-mean",
            {key: Fraction(count, total * tokens[key]) for key, count in main.items() if count and tokens[key]},
        )


def _case(context: StepContext, together: Sequence[tuple[Term, _Fit]]) -> Case:
    """Terms that were evaluated on one line and are off by one factor."""
    term, fit = together[0]
    first = min(term.evaluations, key=lambda one: (one.key[1], one.rank, one.loss.seq))
    names = tuple(term.name for term, _ in together)
    counts = {f"{term.name}_tokens": float(fit.num_tokens) for term, fit in together}
    case = Case(
        context=replace(context, quantities=context.quantities | counts),
        culprit=Culprit("loss", first.rank, first.loss, factor=fit.factor, gradient=first.gradient),
        held=[],
        cells=[],
        patterns=[
            Pattern(
                "uniform",
                f"every evaluation of {', '.join(names)} x {fit.factor:.6g}, beside the main loss",
                fit.factor,
                tolerance=fit.tolerance,
            )
        ],
        terms=names,
        term_ranks=tuple(sorted({one.rank for term, _ in together for one in term.evaluations})),
    )
    name_case(case)
    return case
