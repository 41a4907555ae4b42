"""The simplest shape that explains every cell of a ratio matrix within its tolerance.

Hypotheses are tried in the order of their number of free parameters. A shape that none of them describes is "other":
it is told in numbers and never renamed into something known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from gradcheck_dist.diagnosis.weights import shapes
from gradcheck_dist.diagnosis.weights.cells import weighs_nothing
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.factors import SPAN, SURE, name_number
from gradcheck_dist.diagnosis.weights.partial_counts import partitions
from gradcheck_dist.diagnosis.weights.written import VAGUE, is_written
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.expected import OBJECTIVES, expected_apart
from gradcheck_dist.wording import numbered


@dataclass(frozen=True)
class Sample:
    """One cell as a hypothesis sees it. `holder_data_rank` is the data coordinate of the rank that holds it, `repeats`
    how often events like the culprit acted on the contribution, `largest` the matrix's largest ratio, 1 at most."""

    key: ContributionKey
    holder: int
    holder_data_rank: int
    ratio: float
    margin: float
    repeats: int = 0
    largest: float = 1.0

    @property
    def tolerance(self) -> float:
        """The margin relative to the ratio."""
        return self.margin / max(abs(self.ratio), 1e-12)

    @property
    def wrong(self) -> bool:
        return abs(self.ratio - 1) > self.margin

    @property
    def gone(self) -> bool:
        """The contribution weighs nothing."""
        return weighs_nothing(self.ratio, self.margin, self.largest)


@dataclass(frozen=True)
class Pattern:
    """`kind` is one of uniform, geometric, repeated, objective, own-rank-only, zeroed, partial, part, power, other.

    `factor` is the ratio's common factor; `base` of a geometric or repeated pattern is what each repetition multiplies;
    `objective` names another objective that the weights follow (times factor), `count` the power of a count that they
    follow: N_g tokens of a part of the step ("partial": `num_parts` is how many parts there are), n_c tokens of the
    contribution, N_r of its data rank, N_k of its accumulation step on all ranks, L_c its labels (ignored ones too),
    T_c the length of the rows that these are laid into, accumulation step k of K, microbatch m or data rank r. `place`
    names the weights that it describes, where the others are right.
    """

    kind: str
    text: str
    factor: float
    base: float | None = None
    objective: str | None = None
    tolerance: float = 1e-3
    count: str | None = None
    num_parts: int = 1
    place: str = ""


Hypothesis = Callable[[list[Sample], StepContext], Pattern | None]


def explain(samples: list[Sample], context: StepContext) -> list[Pattern]:
    """All shapes that fit, simplest first; at least one (`other` when nothing does)."""
    fits = [pattern for hypothesis in HYPOTHESES if (pattern := hypothesis(samples, context)) is not None]
    fits.sort(key=lambda pattern: _own_numbers(pattern, context))
    return fits or [_other(samples)]


def _own_numbers(pattern: Pattern, context: StepContext) -> tuple[int, int]:
    """How many numbers nobody knows a shape needs, and whether it needs a factor at all beside a power, a count or
    another objective."""
    if pattern.base is None and pattern.kind not in ("objective", "partial", "power"):
        return 0, 0
    numbers = [pattern.factor] if abs(pattern.factor - 1) > 2 * pattern.tolerance else []
    lead = len(numbers)
    numbers += [pattern.base] if pattern.base is not None and lead else []
    known = {**context.quantities, "groups": float(pattern.num_parts)}
    if pattern.kind == "objective":  # a sum of means, of each rank's or of all ranks', that nothing divides
        total, ranks = len(context.contributions.by_key), max(context.contributions.num_coordinates, 1)
        known |= {"contributions": float(total), "passes": total / ranks}
    tolerance = max(2 * pattern.tolerance, 1e-6)
    nameless = sum(not name_number(abs(number), known, tolerance, max_factors=1) for number in numbers)
    return (nameless if lead else 0), lead


def tolerance_of(samples: Iterable[Sample]) -> float:
    """The relative tolerance of a number that all samples share: that of the best measured one."""
    return min((sample.tolerance for sample in samples if not sample.gone), default=1e-6)


def _constant(values: np.ndarray, tolerances: np.ndarray) -> float | None:
    """The common value of measurements with relative tolerances, None when they differ."""
    middle = float(np.average(values, weights=1.0 / np.maximum(tolerances * np.abs(values), 1e-12) ** 2))
    if np.all(np.abs(values - middle) <= 2 * tolerances * np.maximum(np.abs(middle), np.abs(values))):
        return middle
    return None


def _spread(values: np.ndarray, tolerances: np.ndarray) -> float:
    """Sum of squares of what the best common value leaves, in tolerances."""
    weights = 1.0 / np.maximum(tolerances * np.abs(values), 1e-12) ** 2
    middle = float(np.average(values, weights=weights))
    return float((weights * (values - middle) ** 2).sum())


def _arrays(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([s.ratio for s in samples]), np.array([s.tolerance for s in samples])


def _uniform(samples: list[Sample], context: StepContext) -> Pattern | None:
    there = [sample for sample in samples if not sample.gone]
    factor = _constant(*_arrays(there)) if there else None
    if factor is None or any(abs(sample.ratio - factor) > sample.margin for sample in samples if sample.gone):
        return None
    if abs(factor - 1) <= tolerance_of(samples) and any(sample.wrong for sample in samples):
        return None  # a common factor of 1 explains nothing
    return Pattern("uniform", f"every contribution x {factor:.6g}", factor, tolerance=tolerance_of(samples))


def _geometric(samples: list[Sample], context: StepContext) -> Pattern | None:
    """ratio = factor * base^(K-1-k) in the accumulation step k."""
    last = context.num_accumulation - 1
    fit = _powers(samples, [last - sample.key[1] for sample in samples])
    if fit is None:
        return None
    factor, base, tolerance = fit
    if last == 1 and not is_written(base, max(tolerance, VAGUE), context.quantities):
        return None  # two numbers are always a progression
    values = " ".join(f"{factor * base**exponent:.4g}" for exponent in range(last, -1, -1))
    text = f"x {values} by accumulation step: {_times(factor)}{base:.6g}^(K-1-k)"
    return Pattern("geometric", text, factor, base=base, tolerance=tolerance)


def _repeated(samples: list[Sample], context: StepContext) -> Pattern | None:
    """ratio = factor * base^(n-1), n being how often events like the culprit acted on the contribution."""
    fit = _powers(samples, [max(sample.repeats - 1, 0) for sample in samples])
    if fit is None:
        return None
    factor, base, tolerance = fit
    slots = sorted({(s.key[1], s.key[2]): s.ratio for s in samples}.items())
    values = " ".join(f"{ratio:.4g}" for _, ratio in slots[:16])
    text = f"x {values} by accumulation step and microbatch: {_times(factor)}{base:.6g}^(repetitions)"
    return Pattern("repeated", text, factor, base=base, tolerance=tolerance)


def _times(factor: float) -> str:
    """A factor in front of another; nothing where it is 1."""
    return "" if f"{factor:.6g}" == "1" else f"{factor:.6g} * "


def _powers(samples: list[Sample], powers: list[int]) -> tuple[float, float, float] | None:
    """(factor, base, relative tolerance) of ratio = factor * base^power; None when it does not fit or the base is 1."""
    ratios, tolerances = _arrays(samples)
    exponents = np.array(powers)
    # A power law has no zeros: a ratio that its tolerance cannot tell from zero refutes it.
    if len(set(powers)) < 2 or np.any(ratios <= 0) or np.any(tolerances >= 1):
        return None
    design = np.stack([np.ones(len(samples)), exponents], axis=1)
    weights = 1.0 / np.maximum(tolerances, 1e-9)
    (intercept, slope), *_ = np.linalg.lstsq(design * weights[:, None], np.log(ratios) * weights, rcond=None)
    fitted = np.exp(design @ np.array([intercept, slope]))
    base = float(np.exp(slope))
    if np.any(np.abs(ratios / fitted - 1) > 2 * tolerances * (1 + exponents)):
        return None
    covariance = np.linalg.inv((design * weights[:, None] ** 2).T @ design)
    tolerance = tolerance_of(samples) + float(np.sqrt(covariance[1, 1]))
    return None if abs(base - 1) <= tolerance else (float(np.exp(intercept)), base, tolerance)


def _objective(samples: list[Sample], context: StepContext) -> Pattern | None:
    """The weights of another objective, times a factor: nearer to the ratios than one factor alone is, since within
    wide tolerances many objectives fit, and those of token counts that differ by little nearly agree."""
    tokens = {key: c.num_tokens for key, c in context.contributions.by_key.items() if c.num_tokens}
    models = context.models or [tokens.keys()]
    declared = expected_apart(context.objective, tokens, models)
    best: Pattern | None = None
    if any(sample.gone for sample in samples):
        return None
    for name in OBJECTIVES:
        if name in (context.objective, "sum", "sequence-mean"):
            continue
        other = expected_apart(name, tokens, models)
        if any(sample.key not in other for sample in samples):
            continue
        predicted = np.array([float(other[sample.key] / declared[sample.key]) for sample in samples])
        if np.ptp(predicted) <= 1e-9:
            continue
        ratios, tolerances = _arrays(samples)
        factor = _constant(ratios / predicted, tolerances)
        if factor is None or 2 * _spread(ratios / predicted, tolerances) > _spread(ratios, tolerances):
            continue
        low, high = float(ratios.min()), float(ratios.max())
        text = f"the weights of {name} instead of {context.objective}: x {low:.4g} to x {high:.4g}"
        pattern = Pattern("objective", text, factor, objective=name, tolerance=tolerance_of(samples))
        if best is None or abs(factor - 1) < abs(best.factor - 1) - 1e-6:
            best = pattern
    return best


def _own_rank_only(samples: list[Sample], context: StepContext) -> Pattern | None:
    """A holder has only its own rank's contributions (of some accumulation steps); the others' weigh nothing."""
    own = [s for s in samples if s.key[0] == s.holder_data_rank]
    others = [s for s in samples if s.key[0] != s.holder_data_rank]
    if not others or not all(s.gone for s in others) or (own and all(s.gone for s in own)):
        return None
    if not own:
        return Pattern("own-rank-only", "other ranks' contributions x 0", 0.0, tolerance=tolerance_of(samples))
    ratios, tolerances = _arrays(own)
    factor = _constant(ratios, tolerances)
    if factor is None:
        return None
    text = f"other ranks' contributions x 0, own rank's x {factor:.6g}"
    return Pattern("own-rank-only", text, factor, tolerance=tolerance_of(samples))


def _zeroed(samples: list[Sample], context: StepContext) -> Pattern | None:
    """Some contributions weigh nothing, the rest are right or share one factor."""
    gone = [s for s in samples if s.gone]
    rest = [s for s in samples if not s.gone]
    if not gone:
        return None
    if not rest:
        return Pattern("zeroed", "every contribution x 0", 0.0, tolerance=tolerance_of(samples))
    ratios, tolerances = _arrays(rest)
    factor = _constant(ratios, tolerances)
    if factor is None:
        return None
    steps = sorted({s.key[1] for s in gone} - {s.key[1] for s in rest})
    which = numbered("accumulation step", steps) if steps else f"{len(gone)} of {len(samples)} weights"
    ranks = sorted({s.key[0] for s in gone} - {s.key[0] for s in rest})
    if not steps and ranks and {s.key[0] for s in gone} == set(ranks):
        which = f"contributions of {numbered('data rank', ranks)}"
    if all(s.key[0] != s.holder_data_rank for s in gone):
        of = numbered("accumulation step", sorted({s.key[1] for s in gone}))
        which = _of_other_ranks(samples) or f"other ranks' contributions of {of}"
    return Pattern("zeroed", f"{which} x 0, the rest x {factor:.6g}", factor, tolerance=tolerance_of(samples))


def _of_other_ranks(samples: list[Sample]) -> str | None:
    """Of how many other ranks all contributions are gone, where that is the same for all holders; None where it is
    not, or some of a rank's contributions are there."""
    of: dict[int, dict[int, set[bool]]] = defaultdict(lambda: defaultdict(set))
    for s in samples:
        if s.key[0] != s.holder_data_rank:
            of[s.holder][s.key[0]].add(s.gone)
    found = {(sum(True in gone for gone in ranks.values()), len(ranks)) for ranks in of.values()}
    whole = all(len(gone) == 1 for ranks in of.values() for gone in ranks.values())
    if not whole or len(found) != 1:
        return None
    some, every = found.pop()
    return f"{some} of {every} other ranks' contributions" if some < every else "other ranks' contributions"


def _other(samples: list[Sample]) -> Pattern:
    """A description in numbers, along the coordinates that the ratio depends on."""
    ratios = np.array([sample.ratio for sample in samples])
    factor = float(np.median(ratios))
    coordinates = {
        "data rank": [s.key[0] for s in samples],
        "accumulation step": [s.key[1] for s in samples],
        "microbatch": [s.key[2] for s in samples],
        "holder rank": [s.holder for s in samples],
    }
    parts = []
    for name, values in coordinates.items():
        means = {value: float(np.median(ratios[np.array(values) == value])) for value in sorted(set(values))}
        if len(means) > 1 and np.ptp(list(means.values())) > 2 * tolerance_of(samples) * abs(factor):
            shown = ", ".join(f"{value}: {mean:.4g}" for value, mean in list(means.items())[:8])
            parts.append(f"by {name} {{{shown}}}")
    text = f"x {ratios.min():.4g} to x {ratios.max():.4g} (median {factor:.4g})" + (
        "; " + "; ".join(parts) if parts else ""
    )
    return Pattern("other", text, factor, tolerance=tolerance_of(samples))


def _part(samples: list[Sample], context: StepContext) -> Pattern | None:
    """One factor on some weights, the others are right."""
    wrong = [sample for sample in samples if sample.wrong]
    if len(wrong) == len(samples) or any(sample.gone for sample in samples):
        return None
    factor = _constant(*_arrays(wrong)) if wrong else None
    if factor is None:
        return None
    place = _place(wrong, samples)
    text = f"x {factor:.6g} on {place}, the rest right"
    return Pattern("part", text, factor, tolerance=tolerance_of(wrong), place=place)


def _power_of_count(samples: list[Sample], context: StepContext) -> Pattern | None:
    """ratio = factor * count^power: tokens, or the number of the step, microbatch or rank."""
    tokens = {key: c.num_tokens for key, c in context.contributions.by_key.items() if c.num_tokens}
    ratios, tolerances = _arrays(samples)
    by_key = context.contributions.by_key
    labels = {key: c.loss.num_labels or 0 for key, c in by_key.items() if c.loss is not None}
    keys = [sample.key for sample in samples]
    rows = {key: c.samples.num for key, c in by_key.items() if c.samples is not None}
    known = shapes.counts(keys, tokens, labels, float(tolerances.max()), rows)
    found = shapes.power_law(ratios, tolerances, known)
    if found is None:
        return None
    factor, name, power = found
    tolerance = tolerance_of(samples)
    lead = "" if abs(factor - 1) <= 2 * tolerance else f"{factor:.6g} * "
    text = f"x {ratios.min():.4g} to x {ratios.max():.4g}: {lead}{name}^{power:g}"
    return Pattern("power", text, factor, tolerance=tolerance, count=f"{name}^{power:g}")


def _partial_count(samples: list[Sample], context: StepContext) -> Pattern | None:
    """ratio = factor * N / N_g, on all weights or on some, the others being right."""
    tokens = {key: c.num_tokens for key, c in context.contributions.by_key.items() if c.num_tokens}
    if any(sample.gone or sample.key not in tokens for sample in samples):
        return None
    ways = partitions(list(tokens), context.contributions.groups, context.contributions.coordinate.values())
    degrees = {name: value for name, value in context.quantities.items() if name != "num_tokens" and value > 1}
    best: Pattern | None = None
    for chosen in (samples, [sample for sample in samples if sample.wrong]):
        if best is not None or not chosen:
            break
        ratios, tolerances = _arrays(chosen)
        for way in ways:
            counted = way.tokens_of(tokens)
            predicted = np.array([sum(tokens.values()) / counted[sample.key] for sample in chosen])
            factor = _constant(ratios / predicted, tolerances)
            if factor is None or factor <= 0:
                continue
            tolerance = tolerance_of(chosen)
            values = shapes.num_constants(predicted, tolerance)  # counts that are alike put the factor to no test
            number = factor * float(predicted[0]) if values == 1 and chosen is not samples else None
            whole = number is not None and abs(number - round(number)) <= tolerance * number
            if number is not None and (whole or name_number(number, degrees, max(tolerance, 1e-6), max_factors=1)):
                continue  # one count that is no other number than a whole one or a degree: that needs no count
            if values == 1:  # one number, so it must be known well, and its factor have a name
                named = tolerance <= VAGUE and (
                    abs(factor - 1) <= tolerance or name_number(factor, degrees, max(tolerance, 1e-6), max_factors=1)
                )
                odds = (1 + 2 * len(degrees)) if named else np.inf
            else:
                odds = 1
            by_chance = len(ways) * odds * (2 * tolerance / SPAN) ** max(values - 1, 1)
            if by_chance > SURE or (best is not None and abs(np.log(factor)) >= abs(np.log(best.factor)) - 1e-6):
                continue
            place = "" if chosen is samples else _place(chosen, samples)
            part = f" on {place}, the rest right" if place else ""
            text = f"the tokens of {way.words} instead of all: x {ratios.min():.4g} to x {ratios.max():.4g}{part}"
            best = Pattern(
                "partial", text, factor, tolerance=tolerance, count="N / N_g", num_parts=way.num_parts, place=place
            )
    return best


def _holders_count(samples: list[Sample], context: StepContext) -> Pattern | None:
    """ratio = factor * N / N_r, N_r being the tokens of the rank that holds the weight, of whichever contribution, or
    factor * N / N_h, those of a group in which it is."""
    of_rank: dict[int, int] = {}
    for key, contribution in context.contributions.by_key.items():
        of_rank[key[0]] = of_rank.get(key[0], 0) + (contribution.num_tokens or 0)
    holders = [sample.holder_data_rank for sample in samples]
    if any(sample.gone for sample in samples) or not all(map(of_rank.get, holders)):
        return None
    if len({sample.key[0] for sample in samples}) < 2:
        return None
    ratios, tolerances = _arrays(samples)
    tolerance = tolerance_of(samples)
    one_each = {(rank, 0, 0): count for rank, count in of_rank.items()}
    ways = partitions(list(one_each), context.contributions.groups)
    groups = [(f"group ({way.words}) of the ", way.num_parts, way.tokens_of(one_each)) for way in ways]
    for whose, num_parts, counted in [("", len(of_rank), one_each), *groups]:
        counts = np.array([float(counted[rank, 0, 0]) for rank in holders])
        values = shapes.num_constants(1.0 / counts, tolerance)
        factor = _constant(ratios * counts / sum(of_rank.values()), tolerances)
        if values < 2 or factor is None or factor <= 0:
            continue
        if whose and len(ways) * (2 * tolerance / SPAN) ** (values - 1) > SURE:
            continue
        part = f"the tokens of the {whose}rank that holds a gradient"
        text = f"{part} instead of all: x {ratios.min():.4g} to x {ratios.max():.4g}"
        count = "N / N_h" if whose else "N / N_r"
        return Pattern("partial", text, factor, tolerance=tolerance, count=count, num_parts=num_parts)
    return None


def _place(wrong: list[Sample], samples: list[Sample]) -> str:
    """Which part of the matrix is wrong, in words."""
    places = {id(s): shapes.Place(s.key, s.holder, s.holder_data_rank) for s in samples}
    return shapes.where([places[id(s)] for s in wrong], list(places.values()))


HYPOTHESES: tuple[Hypothesis, ...] = (
    _uniform,
    _objective,
    _geometric,
    _repeated,
    _own_rank_only,
    _zeroed,
    _partial_count,
    _holders_count,
    _part,
    _power_of_count,
)
