"""Losses that count no tokens and are one mean or sum over elements: what an element, or a row of them, should weigh.

Mean squared error, binary cross-entropy, a distance by hand: the autograd graph tells how many elements one mean or sum
goes over, and the gradient that arrives there what each weighs. Where these weights come out as an objective asks for,
the step is right, whatever its elements are. Where they do not, nobody is accused: whether one factor is a coefficient
is not known, and neither is whether elements, rows or microbatches are to weigh alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median

import msgspec

from gradcheck_dist.diagnosis.losses.summed_again import made_up_for, summed_again
from gradcheck_dist.diagnosis.weights.cells import MAX_SPREAD, Cell, Held
from gradcheck_dist.diagnosis.weights.degrees import degrees_of, same
from gradcheck_dist.diagnosis.weights.fractions import fraction_of
from gradcheck_dist.events import LossGradient
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions
from gradcheck_dist.wording import numbered

Judge = Callable[[list[Held], Contributions, dict[ContributionKey, Fraction]], list[Held]]
Expect = Callable[[str, Mapping[ContributionKey, int]], dict[ContributionKey, Fraction]]
BOTH = 2
MEANS = "microbatch-mean"
WEIGHTS = "weights of tokens"
SEQUENCES = "sequences, beside weights of their own"
SAME = 1e-3
GAINS = frozenset({"logsigmoid"})
"""Losses of torch's own that are log-probabilities, and enter with a minus."""
DECLARE = "all elements of the step should weigh alike"
OPEN = {
    MEANS: "each pass's loss is a mean over its own elements, of which passes have unequal numbers, and all these "
    "means weigh alike: right where that is meant ({option} says so), a mean of means where "
    f"{DECLARE} (--objective global-token-mean)",
    "rank-token-mean": "each rank's losses are divided by its own number of elements, of which ranks have unequal "
    "numbers: right where a mean over ranks is meant ({option} says so), wrong where "
    f"{DECLARE} (--objective global-token-mean)",
}
"""What is left open where weights are right by another objective than the one that is asked for, by that one."""


@dataclass
class Counted:
    """Contributions that count elements or rows, what each of these should weigh, and `words` for what they are.
    `reason`: what leaves it open that this is right; "" where nothing does. Then `asked` is what the objective asks for
    that nobody declared. `made_up`: why they may be right by chance, whatever is declared."""

    contributions: Contributions
    expected: dict[ContributionKey, Fraction]
    tokens: dict[ContributionKey, int]
    words: str
    reason: str = ""
    made_up: str = ""
    asked: dict[ContributionKey, Fraction] | None = None


Told = tuple[int, float] | None
"""How many enter a pass's loss, and with what weight each."""


def by_elements(
    objective: str, contributions: Contributions, measured: list[Held], judge: Judge, expect: Expect
) -> Counted | None:
    """The contributions by what their losses go over, where that tells what each should weigh: all weights are right
    so, or the losses divide by what all of them go over. Right as means of passes or ranks only is left open."""
    counts = [one for words in (*OF_WEIGHTED, *_OF_GRADIENT) if (one := count_by(words, contributions)) is not None]
    for asked in dict.fromkeys((objective, *OPEN)):
        for one in counts:
            one.expected = expect(asked, one.tokens)
            if _right(one, measured, judge):
                one.made_up = made_up_for(one.contributions, judge(measured, one.contributions, one.expected))
                return by_other(one, asked, objective, expect)
    for one in counts:
        one.expected = expect(objective, one.tokens)
        if one.words == WEIGHTS:
            continue  # no count
        judged = judge(measured, one.contributions, one.expected)
        if _divides_by_all(one) or _changed_apart(one, measured, judge) or summed_again(judged):
            return one
    return None


def by_other(one: Counted, asked: str, objective: str, expect: Expect) -> Counted:
    """What is right as `asked`, with what leaves that open where nobody declared it."""
    if asked != objective:
        one.asked = expect(objective, one.tokens)
        one.reason = OPEN[asked].format(option=f"--objective {asked}") + _how_far(one.expected, one.asked)
    return one


def _how_far(weights: Mapping[ContributionKey, Fraction], asked: Mapping[ContributionKey, Fraction]) -> str:
    """What a user needs to decide whether it matters which of two objectives is meant: between what numbers the ratios
    of their weights lie."""
    ratios = sorted(float(weights[key] / asked[key]) for key in weights if asked.get(key))
    return f"; by the latter, this step's weigh from x {ratios[0]:.4g} to x {ratios[-1]:.4g}" if ratios else ""


def _changed_apart(one: Counted, measured: list[Held], judge: Judge) -> bool:
    """Whether the weights of some parameters are right, and lines that nobody recorded changed those of all others, or
    nothing multiplies the means: else the others' may be a coefficient, and the first the ones that were changed."""
    judged = [held for held in judge(measured, one.contributions, one.expected) if held.cells]
    wrong = [held for held in judged if not all(cell.right for cell in held.cells)]
    return 0 < len(wrong) < len(judged) and (not any(map(_as_recorded, wrong)) or _are_bare(one))


def _are_bare(one: Counted) -> bool:
    """Whether each pass's loss is a mean that nothing multiplies, but for the number of passes, which divides it."""
    num_passes = len({key[1:] for key in one.contributions.by_key})
    for counted in one.contributions.by_key.values():
        gradient, mean = counted.gradient, abs((counted.weight or 0.0) * (counted.num_tokens or 0))
        if gradient is None or gradient.reduced_by != "mean":
            return False
        divided = abs(mean - 1) > SAME
        if gradient.num_factors != int(divided) or (divided and abs(mean * num_passes - 1) > SAME):
            return False
    return True


def _as_recorded(held: Held) -> bool:
    """Whether the gradient that the optimizer read is what recorded operations made of the contributions."""
    if held.observed is None or held.nominal is None:
        return False
    seen = [
        (value, told) for value, told, is_seen in zip(held.observed, held.nominal, held.visible, strict=True) if is_seen
    ]
    return all(abs(value - told) <= SAME * max(abs(value), abs(told)) for value, told in seen)


def _divides_by_all(one: Counted) -> bool:
    """Whether the program divides by what all ranks' and passes' losses go over: each is a sum that one number
    multiplies, or goes over another number of elements. No coefficient makes these weights; a number of passes or ranks
    may be one, and a fraction that stands there (1/2 before a squared error) may look like one over that number. A mean
    that nothing multiplies divides by its own pass's elements, which what masks keep in all passes may happen to be."""
    num = sum(one.tokens.values())
    gradients = [c.gradient for c in one.contributions.by_key.values() if c.gradient is not None]
    if any(gradient.reduced_by == "mean" and not gradient.num_factors for gradient in gradients):
        return False
    alone = all(gradient.reduced_by in ("sum", None) and gradient.num_factors == 1 for gradient in gradients)
    alone |= len(set(one.tokens.values())) > 1
    degrees = degrees_of(one.contributions)
    alone &= num not in degrees and not any(degrees & set(gradient.divided_by or ()) for gradient in gradients)
    weights = [(c.weight or 0.0) * num for c in one.contributions.by_key.values()]
    return alone and all(abs(weight - 1) <= SAME / num for weight in weights)


def count_by(words: str, contributions: Contributions) -> Counted | None:
    """The contributions by what their losses go over in one of these senses; None where that is not known of all."""
    if words in OF_WEIGHTED:
        return _weighted(contributions, words)
    by_key, degrees = contributions.by_key, degrees_of(contributions)
    tokens: dict[ContributionKey, int] = {}
    counted = {}
    of_sequences = _weights_of_sequences(contributions) if words == "sequences" else {}
    for key, one in by_key.items():
        told = _OF_GRADIENT[words](one.gradient, degrees) if one.gradient is not None else None
        if told is None or one.gradient is None:
            return None
        tokens[key], weight = _parted(told, one.gradient, of_sequences.get(key[0], 0.0))
        alone = msgspec.structs.replace(one.gradient, other_losses=0)  # the one mean or sum is the whole root
        counted[key] = replace(one, num_tokens=tokens[key], weight=weight, spread=0.0, gradient=alone)
    if _is_gain(contributions, [one.weight or 0.0 for one in counted.values()]):
        counted = {key: replace(one, weight=-(one.weight or 0.0)) for key, one in counted.items()}
    return Counted(replace(contributions, by_key=counted), {}, tokens, words) if any(tokens.values()) else None


def _weighted(contributions: Contributions, words: str) -> Counted | None:
    """The contributions by the tokens that weights of their own multiply: judged is what multiplies all of them."""
    counted = {}
    for key, one in contributions.by_key.items():
        beside = one.gradient.beside_weights if one.gradient is not None and one.num_losses == 1 else None
        num = OF_WEIGHTED[words](one)
        if beside is None or num is None or (one.weighs_nothing and (one.loss is None or one.loss.num_labels)):
            return None  # weights that are all zero may be masks, or the data's: how many they are of is not known
        counted[key] = replace(one, num_tokens=num, weight=beside, spread=0.0)  # type: ignore[arg-type]
    if all((one.weight or 0.0) < 0 for one in counted.values()):  # log-probabilities enter with a minus
        counted = {key: replace(one, weight=-(one.weight or 0.0)) for key, one in counted.items()}
    tokens = {key: one.num_tokens or 0 for key, one in counted.items()}
    total = float(sum(tokens.values()))
    if words == WEIGHTS and any(abs(total - degree) <= SAME * total for degree in degrees_of(contributions)):
        return None  # they may have been divided by their own sum in each pass, or on each rank
    return Counted(replace(contributions, by_key=counted), {}, tokens, words) if total else None


def _is_gain(contributions: Contributions, weights: Sequence[float]) -> bool:
    """Whether every pass makes its mean larger: of a gain (a log-probability, a similarity) the sign is the program's.
    Nobody makes an error larger on purpose in all of them."""
    errors = [
        one
        for one in contributions.by_key.values()
        if one.gradient is not None
        and (one.gradient.compares and not one.gradient.computed)  # a curve's sign is the program's
        and (one.loss is None or one.loss.op not in GAINS)
    ]
    return not errors and bool(weights) and max(weights) < 0


def _reduced(one: LossGradient, _: set[int]) -> Told:
    """What the mean or sum goes over. Weights of elements are a part of what is reduced, and so is one number before
    each of them; masks are not, but for those of some elements of a row that is reduced as a whole."""
    if one.num_reduced is None or one.reduced_weight is None:
        return None
    if one.num_rows_used != one.num_reduced and beneath_mean(one) is None and not _is_weighted(one):
        return None
    return one.num_reduced, one.reduced_weight


def _elements(one: LossGradient, degrees: set[int]) -> Told:
    """What is reduced but for masks, each with what multiplies it. Half of each may be half a squared error, or what
    two passes or ranks are divided by: neither is taken for granted."""
    if 2 in degrees and abs((beneath_mean(one) or 1.0) - 1 / 2) <= SAME:
        return None
    low, high = one.element_min, one.element_max
    if low is None or high is None or one.num_elements is None or not abs(high - low) <= MAX_SPREAD * abs(high):
        return None
    return one.num_elements, high


def _rows(one: LossGradient, degrees: set[int]) -> Told:
    """Rows of all elements. As many elements a row as there are passes would make a missing division look right."""
    if one.num_reduced is None or not one.num_rows or one.reduced_weight is None or not whole(one):
        return None
    if one.reduced_by == "mean":
        return one.num_rows, one.reduced_weight * one.num_reduced / one.num_rows
    return (one.num_rows, one.reduced_weight) if one.num_reduced // one.num_rows not in degrees - {1} else None


def _samples(one: LossGradient, _: set[int]) -> Told:
    """Sequences in a list of parts, each a mean over its own elements."""
    spread, weight = one.sample_spread, one.sample_weight
    if not one.computed or one.num_samples is None or weight is None or spread is None or not spread <= MAX_SPREAD:
        return None
    return one.num_samples, weight


def _weights_of_sequences(contributions: Contributions) -> dict[int, float]:
    """By data rank what a sequence weighs, as a pass tells whose sequences are of several lengths."""
    gradients = [(key[0], one.gradient) for key, one in contributions.by_key.items() if one.gradient is not None]
    return {
        rank: one.sample_weight
        for rank, one in gradients
        if one.sample_weight and one.shortest_sample != one.longest_sample
    }


def _parted(told: tuple[int, float], one: LossGradient, of_sequence: float) -> tuple[int, float]:
    """Neighbours of one length look like one sequence that is longer: as many as it weighs of another pass's."""
    num, weight = told
    times = round(weight / of_sequence) if of_sequence and num == 1 else 1
    whole = (
        times > 1 and abs(weight / times - of_sequence) <= SAME * of_sequence and not (one.longest_sample or 0) % times
    )
    return (times, weight / times) if whole else told


_OF_GRADIENT: dict[str, Callable[[LossGradient, set[int]], Told]] = {
    "entries": _reduced,
    "elements": _elements,
    "rows": _rows,
    "sequences": _samples,
}


def _sum_of_weights(one: Contribution) -> Fraction | None:
    """What the weights of its tokens come to."""
    beside = one.gradient.beside_weights if one.gradient is not None else None
    if not beside or one.weight is None or one.num_tokens is None:
        return None
    total = one.weight * one.num_tokens / beside
    return fraction_of(total) if total > 0 else None


def _weighted_sequences(one: Contribution) -> int | None:
    """What is reduced, where that is sums of tokens; of functions of the data, whatever multiplies these is a part."""
    return one.gradient.num_reduced if one.gradient is not None and not one.gradient.computed else None


OF_WEIGHTED: dict[str, Callable[[Contribution], int | Fraction | None]] = {
    "tokens that masks keep, beside weights of their own": lambda one: one.gradient.num_kept if one.gradient else None,
    "tokens, beside weights of their own": lambda one: one.num_tokens,
    SEQUENCES: _weighted_sequences,
    "labels, beside weights of their own": lambda one: one.loss.num_tokens if one.loss is not None else None,
    WEIGHTS: _sum_of_weights,
}


def whole(one: LossGradient) -> bool:
    """Whether nothing masks or weighs elements apart."""
    return one.element_share is not None and abs(one.element_share - 1) <= SAME and one.element_min == one.element_max


def beneath_mean(one: LossGradient) -> float | None:
    """The one number that multiplies each element beneath its mean or sum, as the half of a squared error does: 1 where
    nothing does, None where elements weigh apart, some of them are left out, or nothing tells."""
    low, high, share = one.element_min, one.element_max, one.element_share
    if low is None or high is None or share is None or one.num_elements != one.num_reduced:
        return 1.0 if whole(one) else None
    return share if abs(high - low) <= MAX_SPREAD * abs(high) else None


def _is_weighted(one: LossGradient) -> bool:
    low, high = one.element_min, one.element_max
    return low is not None and high is not None and abs(high - low) > MAX_SPREAD * abs(high)


def weights_of_means(contributions: Contributions) -> dict[ContributionKey, float]:
    """What each pass's loss weighs as one mean: sums of losses that compare with targets are means where they are
    divided by just what they go over, so that all passes weigh alike. Empty where they do not, or where as many passes
    or ranks would divide by the same."""
    if not all(c.gradient is not None and c.gradient.compares for c in contributions.by_key.values()):
        return {}
    for words in _OF_GRADIENT:
        one = count_by(words, contributions)
        if one is None or set(one.tokens.values()) <= degrees_of(contributions):
            continue
        weights = {key: (c.weight or 0.0) * (c.num_tokens or 0) for key, c in one.contributions.by_key.items()}
        if max(weights.values()) - min(weights.values()) <= SAME * max(weights.values()):
            return weights
    return {}


def weights_of_passes(contributions: Contributions) -> list[dict[ContributionKey, float]]:
    """What each pass weighs as one mean over its entries, over its elements and over its rows, as far as each is known
    of all passes."""
    counts = [one.contributions.by_key for words in _OF_GRADIENT if (one := count_by(words, contributions)) is not None]
    return [{key: (c.weight or 0.0) * (c.num_tokens or 0) for key, c in by_key.items()} for by_key in counts]


def counted_each(contributions: Contributions) -> list[Counted]:
    """The contributions by all that their losses may be said to go over: tokens, elements, rows, sequences."""
    tokens = {key: c.num_tokens or 0 for key, c in contributions.by_key.items()}
    of_tokens = Counted(contributions, {}, tokens, "tokens") if all(tokens.values()) else None
    counts = [of_tokens, *(count_by(words, contributions) for words in (*OF_WEIGHTED, *_OF_GRADIENT))]
    return [one for one in counts if one is not None]


def _right(one: Counted, measured: list[Held], judge: Judge) -> bool:
    cells = [cell for held in judge(measured, one.contributions, one.expected) for cell in held.cells]
    return bool(cells) and all(cell.right for cell in cells)


def in_words(
    contributions: Contributions,
    measured: list[Held],
    judge: Judge,
    expect: Expect,
    lines: Mapping[str, float] | None = None,
) -> tuple[str, bool]:
    """By how much the weights differ from those of a mean, and whether by unlike numbers; "" where nothing tells. Of
    the mean over all elements where all weights differ by one number from that, else of the average of each pass's
    mean. `lines`: numbers that lines of the program multiply gradients or losses by, in words, of which the one
    is told that makes this number."""
    # Means of sequences divide by their tokens, so how many these are of is no number that weights could come to.
    of_means = all(c.gradient is not None and c.gradient.of_means for c in contributions.by_key.values())
    weighted = sorted(OF_WEIGHTED, key=lambda words: of_means and words != SEQUENCES)
    counts = [count_by(words, contributions) for words in (*weighted, "entries", "elements")]
    one = next((one for one in counts if one is not None), None)
    said = ""
    if one is None:
        return said, False
    for asked, words in _MEANS_OF.items():
        one.expected = expect(asked, one.tokens)
        cells = [cell for held in judge(measured, one.contributions, one.expected) for cell in held.cells]
        ratios = [cell.ratio for cell in cells]
        if not ratios:
            return "", False
        low, high = min(ratios), max(ratios)
        if high - low <= SAME * abs(median(ratios)):
            named = _named(median(ratios), contributions, lines or {})
            return words.format(times=f"x {median(ratios):.6g}", named=named), False
        unlike, named = _by_place(cells, lines or {})
        said = said or words.format(named=named, times=unlike or f"from x {low:.4g} to x {high:.4g}")
    return said, bool(said)


def _named(number: float, contributions: Contributions, lines: Mapping[str, float]) -> str:
    """Which numbers of ranks and passes it is, or one over them, and which line multiplies by it, in words; "" where it
    is none."""
    by_key = contributions.by_key
    ranks, passes = len({key[0] for key in by_key}), len({key[1:] for key in by_key})
    both = ranks * passes if min(ranks, passes) > 1 else 1
    degrees = {"data ranks": ranks, "accumulation steps": passes, "ranks and steps together": both}
    names = [name for name, degree in degrees.items() if degree > 1 and same(number, degree)]
    over = [name for name, degree in degrees.items() if degree > 1 and same(number, 1 / degree)]
    told = [f"{'1 over ' if over else ''}the number of {' or of '.join(names or over)}"] if names or over else []
    told += _lines_of(number, lines)
    return f" ({', '.join(told)})" if told else ""


def _lines_of(number: float, lines: Mapping[str, float]) -> list[str]:
    return sorted(words for words, factor in lines.items() if same(number, factor))


def _by_place(cells: Sequence[Cell], lines: Mapping[str, float]) -> tuple[str, str]:
    """Two numbers that cells have, and on which ranks or in which accumulation steps they have the one that is seldom,
    or farther from 1, and by which line, in parentheses; "" where they have others, or it is told otherwise."""
    levels: list[list[Cell]] = []
    for cell in sorted(cells, key=lambda cell: cell.ratio):
        if levels and cell.ratio - levels[-1][0].ratio <= SAME * abs(levels[-1][0].ratio):
            levels[-1].append(cell)
        else:
            levels.append([cell])
    keys = [{cell.key for cell in level} for level in levels]
    if len(levels) != BOTH or keys[0] & keys[1]:
        return "", ""
    odd, usual = sorted((0, 1), key=lambda at: (len(keys[at]), -abs(levels[at][0].ratio - 1)))
    ranks, steps = ({key[at] for key in keys[odd]} for at in (0, 1))
    if not any(key[0] in ranks for key in keys[usual]):
        place = f"on {numbered('data rank', sorted(ranks))}"
    elif not any(key[1] in steps for key in keys[usual]):
        place = f"in {numbered('accumulation step', sorted(steps))}"
    elif len(ranks) == len(steps) == 1:
        place = f"in {numbered('accumulation step', sorted(steps))} of {numbered('data rank', sorted(ranks))}"
    else:
        return "", ""
    rare, other = levels[odd][0].ratio, levels[usual][0].ratio
    told = _lines_of(rare / other, lines) if other else []
    return f"x {rare:.4g} {place} and x {other:.4g} elsewhere", f" ({told[0]})" if told else ""


def in_means(samples: Contributions, measured: list[Held], judge: Judge, expect: Expect) -> str:
    """The same of sequences, each a mean over its own tokens, of which the contributions hold so many."""
    counts = {key: one.num_tokens for key, one in samples.by_key.items() if one.num_tokens is not None}
    expected = expect("global-token-mean", counts)
    ratios = [cell.ratio for held in judge(measured, samples, expected) for cell in held.cells]
    if not ratios or max(ratios) - min(ratios) > SAME * abs(median(ratios)):
        return ""
    return (
        f"sequences, heads or tasks, each a mean over tokens of its own, weigh x {median(ratios):.6g} of what they "
        "would in one mean over all of the step's"
    )


_MEANS_OF = {
    MEANS: "mean over its elements weighs {times} of what it would in their average{named}",
    "global-token-mean": "elements weigh {times} of what they would in one mean over all of the step's{named}",
}
