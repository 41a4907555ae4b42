"""Losses that are means over samples (sequences): sums over each one's tokens, divided by their number.

    loss = sum((loss_of_tokens * mask).sum() / mask.sum() for each sequence) / global_batch_size

Tokens of one pass weigh apart there, each as 1 / the tokens of its sequence. Where all sequences of all passes weigh
alike so, and some of one pass differ in length, nothing else than such means makes these weights: the contributions
count sequences then, and what follows the losses is judged as it is for tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.weights.cells import MATERIAL, MAX_SPREAD, loss_rounding
from gradcheck_dist.diagnosis.weights.degrees import degrees_of
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions, Samples

OBJECTIVE = "sequence-mean"
INFERRED = (
    "inferred: in each pass the tokens of a sequence weigh 1 / their number, so that sequences of any length weigh "
    "alike; --objective sets it"
)
DECLARED = (
    "the losses weigh sequences alike, whatever the number of their tokens: declared is an objective that weighs "
    "tokens, so what each should weigh is not known. `--objective sequence-mean` judges them as means over sequences"
)
UNDIVIDED = (
    "each pass adds up several losses, as many as ranks or passes are, and the weights are those of their mean, which "
    "nothing at the losses takes: right if what follows divides by the number of losses, and one division by ranks or "
    "passes too many if they were to be added. gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., "
    "coefficient=...) on each loss tells"
)
_TOKENS = re.compile(r"(?<![-\w.])token(s?)(?![-\w])")


@dataclass(frozen=True)
class BySamples:
    """Contributions that count sequences. `certain`: nothing else makes these weights; else heads or tasks of one
    pass, of which each has a mean of its own, would, too, or sequences of one length in each pass, and only their being
    right tells. `undivided`: a pass adds up as many losses as there are ranks or passes, and nothing there makes a mean
    of these: what follows may divide once too often."""

    contributions: Contributions
    certain: bool
    undivided: bool = False


def by_samples(contributions: Contributions, objective: str) -> BySamples | None:
    """The contributions by the sequences in them; None where weights do not show that these weigh alike, or nothing
    tells parts of a batch from sequences, unless they are declared (`objective`) to weigh alike."""
    counted = {key: one for key, one in contributions.by_key.items() if one.num_tokens != 0}
    rounding = max(MATERIAL, loss_rounding(contributions))
    samples = {key: one.samples for key, one in counted.items() if one.samples is not None}
    if not samples or len(samples) < len(counted) or any(one.spread > rounding for one in samples.values()):
        return None
    if objective != OBJECTIVE and any(one.parts for one in samples.values()):
        return None
    shown = any(one.spread > MAX_SPREAD and samples[key].differ for key, one in counted.items())
    samples = _neighbours_apart(counted, samples, rounding) if shown else samples
    by_key = dict(contributions.by_key)
    for key, one in counted.items():
        num = _number(one, samples, key, rounding)
        by_key[key] = replace(one, num_tokens=num, weight=samples[key].total / num, spread=0.0)
    if not shown and len({by_key[key].num_tokens for key in counted}) == 1:
        return None  # means of passes are the same
    found = replace(contributions, by_key=by_key)
    alone = all(one.num_losses == 1 for one in counted.values())
    degrees = degrees_of(found) - {1}
    bare = all(abs((one.weight or 0.0) - 1) <= rounding and one.num_tokens in degrees for one in by_key.values())
    return BySamples(found, shown and (alone or _divided_by_all(found, rounding)), not alone and bare)


def with_lengths(inferred: str, steps: Iterable[Contributions]) -> str:
    """How the objective is known, with by how much tokens weigh apart in it, where sequences of unlike lengths tell."""
    seen = [one.samples for step in steps for one in step.by_key.values() if one.samples is not None]
    shortest = min((one.shortest for one in seen if one.shortest > 0), default=0)
    longest = max((one.longest for one in seen), default=0)
    if inferred != INFERRED or not 0 < shortest < longest:
        return inferred
    apart = f"alike: a token of one of {shortest} weighs x {longest / shortest:.4g} of a token of one of {longest}"
    return inferred.replace("alike", apart)


def _divided_by_all(contributions: Contributions, rounding: float) -> bool:
    """Whether each loss of a pass is a mean by the program's own hand over all ranks' and passes' number of them, as no
    head or task is."""
    counted = [one for one in contributions.by_key.values() if one.num_tokens]
    by_hand = all(one.loss is not None and one.loss.reduction == "none" for one in counted)
    total = contributions.num_tokens or 0
    all_alike = all(abs((one.weight or 0.0) * total - 1) <= rounding for one in counted)
    return by_hand and all_alike and total not in degrees_of(contributions)


def _neighbours_apart(
    counted: Mapping[ContributionKey, Contribution], samples: dict[ContributionKey, Samples], rounding: float
) -> dict[ContributionKey, Samples]:
    """Samples of which those of one length are told apart that look like one: by the number above all tokens' own
    weights, where that is what one sequence weighs in every pass."""
    apart = {}
    for key, own in samples.items():
        gradient = counted[key].gradient
        beside = gradient.beside_weights if gradient is not None and counted[key].num_losses == 1 else None
        times = own.total / own.num / beside if beside else 0.0
        whole = max(round(times), 1)
        if abs(times / whole - 1) > rounding or own.shortest % whole or own.longest % whole:
            return samples
        apart[key] = replace(own, num=own.num * whole, shortest=own.shortest // whole, longest=own.longest // whole)
    return apart


def _of_means(one: Contribution) -> float | None:
    """What each sequence weighs, where a pass reduces their means with no weights of the data."""
    told = one.gradient if one.num_losses == 1 else None
    return told.beside_weights if told is not None and told.of_means and not told.num_reduced else None


def _number(
    one: Contribution, samples: Mapping[ContributionKey, Samples], key: ContributionKey, rounding: float
) -> int:
    """How many sequences a pass holds: neighbours of one length look like one that is longer, where no other length
    beside them tells, so that they weigh as several of another pass of this rank."""
    own = samples[key]
    beside = _of_means(one)
    if beside is not None:
        times = own.total / own.num / beside
        whole = max(round(times), 1)
        if abs(times / whole - 1) <= rounding and not (own.shortest % whole or own.longest % whole):
            return own.num * whole
    if own.differ or own.num > 1:
        return own.num
    told = [of.total / of.num for other, of in samples.items() if of.differ and other[0] == key[0]]
    times = own.total / told[0] if told else 1.0
    whole = max(round(times), 1)
    return whole if abs(times / whole - 1) <= rounding and (one.num_tokens or 0) % whole == 0 else 1


def in_sequences(finding: Finding) -> Finding:
    """What is said of tokens, said of sequences."""
    factor = finding.factor
    candidates = [structs.replace(one, expression=_said(one.expression)) for one in factor.candidates]
    expression = factor.expression and _said(factor.expression)
    return structs.replace(
        finding,
        factor=structs.replace(factor, expression=expression, candidates=candidates),
        pattern=_said(finding.pattern),
        explanation=_said(finding.explanation),
        fix=_said(finding.fix),
    )


def _said(text: str) -> str:
    text = _TOKENS.sub(lambda found: f"sequence{found[1]}", text.replace("token-sum loss", "sum of sequences' means"))
    return text.replace("num_tokens", "num_sequences")
