"""What each contribution's weight is compared with: the objective's, or, where tokens are not known, one another.

Three things stand between an objective and an expected weight. Losses that train disjoint parameters (two models in one
loop) are objectives of their own, each over its own tokens. A class-weighted loss may count labels or class weights.
And a loss whose tokens nobody counted says nothing of its weight: there, what happened to the contributions' own
gradients is compared, since no objective treats one rank or accumulation step unlike another behind the loss's back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import chain

import numpy as np

from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.bare_means import added_means
from gradcheck_dist.diagnosis.losses.class_weights import by_class_weights, tells
from gradcheck_dist.diagnosis.losses.elements import MEANS, OF_WEIGHTED, Counted, by_elements, in_means, in_words
from gradcheck_dist.diagnosis.losses.lines import lines_in_words, lines_that_scale
from gradcheck_dist.diagnosis.losses.loud_ranks import loud_ranks
from gradcheck_dist.diagnosis.losses.marked import marked_aside, without_declared
from gradcheck_dist.diagnosis.losses.parts import counted_once, parts_of_one_loss
from gradcheck_dist.diagnosis.losses.repeated import repeats, replaced, weighing_or_gone
from gradcheck_dist.diagnosis.losses.returned import arrived, looked_at
from gradcheck_dist.diagnosis.losses.samples import UNDIVIDED, by_samples
from gradcheck_dist.diagnosis.losses.several_means import main_term
from gradcheck_dist.diagnosis.losses.shares import Shares, shares_of_mean
from gradcheck_dist.diagnosis.losses.weighted_tokens import all_weighted, are_batches_of_one, turned
from gradcheck_dist.diagnosis.losses.written import Written, as_written
from gradcheck_dist.diagnosis.losses.written_coefficients import in_words as coefficients_in_words
from gradcheck_dist.diagnosis.losses.written_coefficients import is_called_a_weight, written_coefficients
from gradcheck_dist.diagnosis.losses.written_coefficients import without as without_coefficients
from gradcheck_dist.diagnosis.weights.cells import MAX_SPREAD, SIGMAS, Held, judge
from gradcheck_dist.diagnosis.weights.fractions import fraction_of
from gradcheck_dist.events import EXCHANGES_PROBE, Exchange
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions
from gradcheck_dist.ledger.discarded import discarded, emptied_at, evaluated_again, never_reduced, told_apart, without
from gradcheck_dist.ledger.expected import expected_apart
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import plural

EXACT = 1e-5
"""Relative; how near to what is documented a transfer comes out that is measured well."""
NEARLY = 0.5
"""Of the most frequent transfer's number: how many make another one as good an example."""
SAME = 1e-3
"""Transfers nearer to one another than this, relative, are the same."""


SWITCHED_OFF = (
    "the losses that count tokens are multiplied by zero in every pass, and what arrives comes from other terms: right "
    "where a coefficient switches them off"
)


def aim(
    objective: str,
    data: StepData,
    contributions: Contributions,
    measured: list[Held],
    *,
    drop_lost: bool = False,
    written: int | None = None,
) -> Aim:
    """What the weights of a step are compared with. `drop_lost`: passes whose gradients were thrown away are no part of
    the step, also where their tokens were not evaluated again. `written`: which of the readings of losses in a sum
    (`as_written`) is taken, also where the weights, as measured, do not come out right by it."""
    looked = looked_at(data, contributions, measured)
    aside = looked | replaced(data, contributions, measured)
    result = _of_passes(objective, data, without(contributions, aside), measured, drop_lost, written)
    if looked:
        result.remarks.append(
            f"the gradients of {plural(len(looked), 'pass')} were handed to the caller, and nothing of these is in "
            "what the optimizer reads: an inner step, an adversary or a look, and no part of the step"
        )
    return result


def _of_passes(
    objective: str,
    data: StepData,
    contributions: Contributions,
    measured: list[Held],
    drop_lost: bool,
    written: int | None,
) -> Aim:
    weighs, gone = weighing_or_gone(measured)
    # By a recorded zero_grad, or by a line that nobody records (`.grad = None`).
    # What is in a gradient all the same was kept aside and put back (projected gradient descent).
    lost = discarded(data, contributions) - arrived(measured)
    lost |= gone if weighs & set(contributions.by_key) else set()
    lost -= never_reduced(data, contributions)
    contributions = without(contributions, lost if drop_lost else evaluated_again(contributions, lost))
    contributions = replace(contributions, lost=frozenset(lost)) if drop_lost else contributions
    kept = _aim(objective, data, contributions, measured, written)
    by_key = contributions.by_key
    # What counts no tokens leaves none out, whatever its weight.
    weightless = {key for key, c in by_key.items() if c.weighs_nothing and c.num_tokens != 0}
    arrives = any(held.observed is not None and np.nan_to_num(held.observed).any() for held in measured)
    if by_key and len(weightless) == len(by_key) and arrives:
        # A coefficient of zero switches them off, and others that stand beside them train.
        others = _uncounted(objective, data, contributions, measured)
        others.reasons.append(SWITCHED_OFF)
        return others
    left_out = weightless | ((lost & by_key.keys()) - told_apart(contributions, lost))
    if not left_out or len(left_out) == len(by_key):
        return kept
    # Whether the step was to have their tokens nobody knows, but the weights of the others tell what they count.
    meant = _aim(objective, data, without(contributions, left_out), measured, written)
    meant.untold = bool(left_out & lost)
    wrong = _wrong(meant, measured)
    if not wrong and not (meant.relative and left_out & lost):  # weights that are relative tell nothing of others
        if untold := [key for key in left_out if key in lost]:
            seen = any(by_key[key].label_hash is not None for key in untold)
            labels = "that are the same numbers in every batch (0 to n-1, or zeros)" if seen else "that nobody saw"
            meant.reasons.insert(
                0,
                f"the gradients of {plural(len(untold), 'pass')} were emptied before the optimizer "
                f"came{emptied_at(data)}, and labels {labels} do not tell whether the same batch was evaluated "
                "again, as in sharpness-aware training, or these passes are lost",
            )
        return meant
    if not wrong or kept.relative or _wrong(kept, measured) - lost - left_out:
        meant.reasons.insert(
            0,  # what a loss counts is the smaller question
            f"{plural(len(left_out), 'contribution')} without weight: multiplied by zero at the loss, or emptied "
            f"before the optimizer came{emptied_at(data)} and labels not seen. Whether that was meant, or tokens are "
            "missing in the step, cannot be told",
        )
        return meant
    return kept


def _aim(
    objective: str, data: StepData, contributions: Contributions, measured: list[Held], written: int | None
) -> Aim:
    if (again := repeats(data, contributions, measured)) is not None:
        found = _of_losses(objective, data, again.counted_once(contributions), measured, written)
        found.again = again.entered
        found.expected = found.filled(found.expected)
        shares = again.shared_out(contributions, found.expected)
        meant = Aim(found.contributions, shares, found.tokens)
        if not found.relative and _wrong(found, measured) and not _wrong(meant, measured):
            found.expected, found.shared_out = shares, True
        return found
    return _of_losses(objective, data, contributions, measured, written)


def _of_losses(
    objective: str, data: StepData, contributions: Contributions, measured: list[Held], written: int | None
) -> Aim:
    larger = turned(contributions)
    unusable = [
        c for c in contributions.by_key.values() if c.num_tokens is None or c.spread > MAX_SPREAD or c.key in larger
    ]
    groups = independent(data, contributions)
    computed = any(c.gradient is not None and c.gradient.computed for c in contributions.by_key.values())
    if computed and (by_what_is_reduced := _by_elements(objective, data, contributions, measured)) is not None:
        return by_what_is_reduced
    declared = without_declared(contributions, data.events)
    contributions = declared or contributions
    counted = _counted(objective, contributions, groups)
    in_sums = as_written(contributions, data.events) if declared is None else []
    if in_sums and (unusable or _wrong(counted, measured)):
        readings = [(one, _counted(objective, one.contributions, groups)) for one in in_sums]
        means = [_counted(MEANS, one.contributions, groups) for one in in_sums]
        if (without := _without_coefficient(readings, means, measured, written)) is not None:
            return without
    elif (shares := [one for one in in_sums if one.in_place]) and not unusable:
        counted.reasons.append(shares[0].in_place_reason)
    weights = [one for one in written_coefficients(contributions) if is_called_a_weight(one)]
    if weights and not unusable and _wrong(counted, measured):
        freed = _counted(objective, without_coefficients(contributions, weights), groups)
        if not _wrong(freed, measured):
            freed.remarks.append(coefficients_in_words(weights))
            return freed
    if unusable or _wrong(counted, measured):
        samples = _of_samples(objective, contributions, groups, measured)
        if samples is not None:
            return samples
    if contributions.by_key and len(unusable) == len(contributions.by_key):
        return _uncounted(objective, data, contributions, measured)
    if unusable and len(groups) == 1 and all_weighted(contributions):  # also where they happen to be equal
        return _uncounted(objective, data, contributions, measured)
    if groups_of_parts := parts_of_one_loss(data, contributions):
        return _in_parts(objective, counted, groups_of_parts, measured)
    if not computed and are_batches_of_one(contributions) and _wrong(counted, measured):
        beside = _by_elements(objective, data, contributions, measured)
        if beside is not None:
            return beside
    weighted = by_class_weights(contributions)
    if (weighted is None and not computed) or not _wrong(counted, measured):
        return counted
    if weighted is not None:
        sums = {key: c.num_tokens or 0 for key, c in weighted.by_key.items()}
        other = Aim(weighted, expected_apart(objective, sums, groups), sums)
        if not _wrong(other, measured):
            return other
        if tells(weighted) and not tells(contributions):
            other.remarks.append(
                "the losses divide by the weights of their labels' classes: each token counts as its own"
            )
            return other
    return _functions_of_data(objective, data, contributions, measured) if computed else counted


def _without_coefficient(
    readings: list[tuple[Written, Aim]], means: list[Aim], measured: list[Held], written: int | None
) -> Aim | None:
    """Losses in sums without what is written before them there; None where that settles nothing. `means`: the same, as
    means of each pass's own tokens, by which weights are off by nothing but these. `written`: which one is taken,
    whatever the weights."""
    right = [(one, found) for one, found in readings if not _wrong(found, measured)]
    right = right or [pair for pair, mean in zip(readings, means, strict=True) if not _wrong(mean, measured)]
    right = right if written is None else readings[written : written + 1]
    for one, found in sorted(right, key=lambda pair: not pair[0].is_certain)[:1]:
        found.as_written = True
        (found.remarks if one.is_certain else found.reasons).append(one.remark if one.is_certain else one.reason)
        return found
    for one, found in readings:
        ratios = [cell.ratio for held in judge(measured, found.contributions, found.expected) for cell in held.cells]
        if one.is_certain and (all(map(one.explains, ratios)) or not one.may_divide):
            found.as_written = True
            found.remarks.append(one.remark)
            return found
    return None


def _counted(objective: str, contributions: Contributions, groups: list[set[ContributionKey]]) -> Aim:
    tokens = {key: c.num_tokens for key, c in contributions.by_key.items() if c.num_tokens is not None}
    return Aim(contributions, expected_apart(objective, tokens, groups), tokens)


def _of_samples(
    objective: str, contributions: Contributions, groups: list[set[ContributionKey]], measured: list[Held]
) -> Aim | None:
    """Losses whose weights show that they are means over sequences."""
    found = by_samples(contributions, objective)
    if found is None or any(c.gradient is not None and c.gradient.computed for c in contributions.by_key.values()):
        return None
    result = _counted(objective, found.contributions, groups)
    result.of_samples = True
    result.reasons += [UNDIVIDED] if found.undivided else []
    return result if found.certain or not _wrong(result, measured) else None


def _by_elements(
    objective: str, data: StepData, contributions: Contributions, measured: list[Held], words: str = ""
) -> Aim | None:
    """Losses by what their one mean or sum goes over, where that tells."""
    asked = partial(expected_apart, models=independent(data, contributions))
    counted_by = by_elements(objective, contributions, measured, judge, asked)
    if counted_by is not None and not marked_aside(data):
        return _of_elements(counted_by, words or "is one mean or sum")
    if (added := added_means(data, contributions, measured, judge)) is not None:
        return Aim(*added, dict.fromkeys(added[1], 1), of_means=True)
    loud = loud_ranks(objective, data, contributions, measured, judge, asked)
    if loud is not None and not marked_aside(data):
        result = _of_elements(loud[0], words or "is one mean or sum")
        result.loud = loud[1]
        return result
    return None


def _uncounted(objective: str, data: StepData, contributions: Contributions, measured: list[Held]) -> Aim:
    """Losses that count no tokens, of one term or of several."""
    whole = main_term(data, contributions)
    told = contributions if whole is None else whole.contributions
    words = "" if whole is None else whole.words
    found = _by_elements(objective, data, told, measured, words)
    if found is None and (coefficients := written_coefficients(told)):
        freed = _by_elements(objective, data, without_coefficients(told, coefficients), measured, words)
        if freed is not None and (all(map(is_called_a_weight, coefficients)) or _wrong(freed, measured)):
            freed.remarks.append(coefficients_in_words(coefficients))
            return freed
    return _functions_of_data(objective, data, contributions, measured, told) if found is None else found


def _functions_of_data(
    objective: str,
    data: StepData,
    contributions: Contributions,
    measured: list[Held],
    told: Contributions | None = None,
) -> Aim:
    """Losses whose own weights are not judged, and what these come to as means over elements. `told`: contributions
    as they tell of elements, where these are others."""
    asked = partial(expected_apart, models=independent(data, contributions))
    of_elements = contributions if told is None else told
    times, unlike = in_words(of_elements, measured, judge, asked, lines_in_words(data, contributions))
    if not times and (samples := by_samples(contributions, objective)) is not None:
        times = in_means(samples.contributions, measured, judge, asked)
    relative = partial(_relative, data, contributions, measured, times, _as_mean(of_elements))
    result = relative()
    shares = shares_of_mean(of_elements, measured, judge, asked) if _wrong(result, measured) else None
    result = result if shares is None else relative(shares)
    result.unlike = unlike
    return result


def _in_parts(objective: str, counted: Aim, groups: list[list[ContributionKey]], measured: list[Held]) -> Aim:
    """The samples of one loss that several passes evaluate count once, unless the weights are right as if each pass
    had a batch of its own: the verdict is open then."""
    num = max(len(group) for group in groups)
    same = f"{num} backward passes differentiate losses of one value on the same labels, with other gradients"
    once = Aim(counted.contributions, counted_once(objective, counted.tokens, groups), counted.tokens)
    if _wrong(once, measured) and not _wrong(counted, measured):
        counted.reasons.append(
            f"{same}: where these are parts of one loss over one batch, all weigh 1/{num} of what they should; where "
            "each pass has a batch of its own, they weigh what they should"
        )
        return counted
    once.remarks.append(f"{same}: they are taken for parts of one loss over one batch, whose samples count once")
    return once


def independent(data: StepData, contributions: Contributions) -> list[set[ContributionKey]]:
    """Groups of contributions that have no parameter in common, and whose ranks exchange no activations: each has an
    objective of its own."""
    groups: list[set[ContributionKey]] = [{key} for key in contributions.by_key]
    for together in chain(_of_parameters(data, contributions), _of_exchanges(data, contributions)):
        joined = [group for group in groups if group & together]
        if len(joined) > 1:
            groups = [group for group in groups if not group & together] + [set[ContributionKey]().union(*joined)]
        if len(groups) <= 1:
            break
    return groups


def _of_parameters(data: StepData, contributions: Contributions) -> Iterator[set[ContributionKey]]:
    for tracks in data.tracks.values():
        yield {
            (contributions.coordinate.get(rank, rank), *slot) for rank, track in tracks.items() for slot in track.leaves
        }


def _of_exchanges(data: StepData, contributions: Contributions) -> Iterator[set[ContributionKey]]:
    """One pass on the ranks that exchange activations in it. What is not followed may combine those of all ranks."""
    found = {
        (event.group, (event.accumulation_step, event.microbatch))
        for of_rank in data.events.values()
        for event in of_rank
        if isinstance(event, Exchange)
    }
    if data.told(EXCHANGES_PROBE):
        found |= {(tuple(data.events), key[1:]) for key in contributions.by_key}
    for ranks, slot in found:
        yield {(contributions.coordinate.get(rank, rank), *slot) for rank in ranks}


def _wrong(one: Aim, measured: list[Held]) -> set[ContributionKey]:
    judged = judge(measured, one.contributions, one.expected)
    return {cell.key for held in judged for cell in held.cells if not cell.right}


def _of_elements(counted: Counted, whole: str) -> Aim:
    result = Aim(counted.contributions, counted.expected, counted.tokens, of_elements=True)
    computed = any(c.gradient is not None and c.gradient.computed for c in counted.contributions.by_key.values())
    why = "the losses are functions of the data (ratios, curves)" if computed else "the losses count no tokens"
    result.of_weighted = counted.words in OF_WEIGHTED
    if result.of_weighted and not computed:
        why = "the losses weigh each token by a number of its own"
    result.remarks.append(f"{why}, and each pass's {whole}: weights are those of its {counted.words}")
    result.reasons += [counted.made_up] if counted.made_up else []
    result.other = (counted.reason, counted.asked) if counted.asked is not None else None
    return result


def _relative(
    data: StepData,
    contributions: Contributions,
    measured: list[Held],
    times: str,
    meant: float | None,
    shares: Shares | None = None,
) -> Aim:
    """Every contribution counts as one token of weight 1; each should be scaled as the losses ask for (`meant`), as
    most are, or by its share."""
    by_key = {key: replace(c, num_tokens=1, weight=1.0, spread=0.0) for key, c in contributions.by_key.items()}
    if shares is None or shares.expected.keys() != by_key.keys():
        usual = _usual(measured, by_key, lines_that_scale(data), meant)
        shares = Shares(dict.fromkeys(by_key, usual), "")
    return Aim(
        replace(contributions, by_key=by_key),
        shares.expected,
        dict.fromkeys(by_key, 1),
        relative=True,
        aside=marked_aside(data),
        times=times,
        shares=shares.words,
    )


Transfer = tuple[float, tuple[int, int], float, int, float]
"""Measured, (accumulation step, microbatch), documented, how many lines multiply gradients on the rank on which it
arrived and on the one that holds it, and the standard error of what was measured."""


def _as_mean(contributions: Contributions) -> float | None:
    """What passes' own means are to be multiplied by for the mean of all: 1 / ranks, and / passes as well where the
    losses are not divided by these. None where losses are no means, or the program divides them by ranks."""
    by_key = contributions.by_key
    num_ranks, num_passes = len({key[0] for key in by_key}), len({key[1:] for key in by_key})
    gradients = [one.gradient for one in by_key.values() if one.gradient is not None]
    if not gradients or len(gradients) < len(by_key) or any(one.reduced_by != "mean" for one in gradients):
        return None
    divisors = [one.divided_by or [] for one in gradients]
    if num_ranks > 1 and any(number % num_ranks == 0 for of_pass in divisors for number in of_pass):
        return None
    divided = all(any(number % num_passes == 0 for number in of_pass) for of_pass in divisors)
    return 1 / (num_ranks if divided else num_ranks * num_passes)


def _usual(
    measured: list[Held],
    by_key: Mapping[ContributionKey, Contribution],
    lines: Mapping[int, int] | None = None,
    meant: float | None = None,
) -> Fraction:
    """The transfer from a contribution's own gradient to the optimizer's that is `meant`, where some weights have it;
    else that which most weights have, unless half as many have one of ranks with fewer `lines` that multiply gradients;
    of several as frequent ones that of these ranks, that which is documented, and of the latest contributions, to which
    least was done; as the one tells that was measured best. What came to some copies of a parameter only is no example,
    where other weights are. 1 where nothing arrived."""
    everywhere: list[Transfer] = []
    in_part: list[Transfer] = []
    seen: dict[tuple[ParamKey, ContributionKey], list[Transfer | None]] = defaultdict(list)
    for held in measured:
        if held.observed is None or held.stderr is None or held.nominal is None:
            continue
        # Beside the largest, for a loss scale may be taken away from all of them.
        largest = max((abs(value) for value in held.observed.tolist() if np.isfinite(value)), default=0.0)
        for column, key in enumerate(held.replay.basis.keys):
            value, error = float(held.observed[column]), float(held.stderr[column])
            if key in by_key and held.visible[column] and np.isfinite(value):
                is_there = value > max(SAME * min(largest, 1.0), SIGMAS * error)
                on_the_way = {held.rank, held.replay.basis.origin[column]}
                num_lines = sum((lines or {}).get(rank, 0) for rank in on_the_way)
                one = (value, key[1:], float(held.nominal[column]), num_lines, error)
                seen[held.param, key].append(one if is_there else None)
    for transfers in seen.values():
        (in_part if None in transfers else everywhere).extend(one for one in transfers if one is not None)
    found = everywhere or in_part
    if not found:
        return Fraction(1)
    found.sort()
    groups: list[list[Transfer]] = []
    for one in found:
        if groups and one[0] <= groups[-1][0][0] * (1 + SAME):
            groups[-1].append(one)
        else:
            groups.append([one])
    asked = [group for group in groups if meant is not None and abs(group[0][0] - meant) <= SAME * meant]
    best = max(asked or groups, key=lambda group: (len(group), *_least_done(group)))
    # Shards of one model part its parameters unequally: which rank has a few more of them tells nothing.
    near = [group for group in groups if NEARLY * len(best) <= len(group) and _num_lines(group) < _num_lines(best)]
    best = best if asked or not near else max(near, key=lambda group: (len(group), *_least_done(group)))
    value = min(best, key=lambda one: one[-1])[0]
    documented = [
        nominal
        for seen, _, nominal, _, error in best
        if abs(nominal - seen) <= min(SAME, max(EXACT, SIGMAS * error)) * seen
    ]
    return fraction_of(documented[0] if documented else value)


def _least_done(group: list[Transfer]) -> tuple[int, int, tuple[int, int]]:
    """The larger, the fewer of the trainer's lines did something to these, the more of them are what the recorded
    operations document, and the later they came."""
    documented = sum(abs(nominal - value) <= SAME * value for value, _, nominal, *_ in group)
    return -_num_lines(group), documented, max(slot for _, slot, *_ in group)


def _num_lines(group: list[Transfer]) -> int:
    return min(lines for *_, lines, _ in group)
