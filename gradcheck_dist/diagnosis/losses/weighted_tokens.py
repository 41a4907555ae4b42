"""Losses that weigh tokens apart (by document, source or task): which of their steps say nothing of a normaliser.

Where tokens of one contribution have different weights, the program weighs tokens, and what all weights together should
come to is not known. A contribution, or a whole step, whose tokens happen to weigh alike (all of one source) was
weighted by the same line: its weight is one of the program's numbers, and no normaliser that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isinf
from pathlib import PurePath
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.weights.cells import MAX_SPREAD
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, Contributions

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Finding
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

Place = tuple[str, int, int]
"""File and line of a loss, and how many losses its pass adds up: further ones may be of another coefficient."""
_APART = (
    "the loss at {line} gives tokens of one contribution different weights in step {step}: what its weights should "
    "come to where they happen to be equal is not known. gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., "
    "coefficient=...) on each loss tells"
)
_TURNS = (
    "the loss at {line} is multiplied by a number below zero in step {step}: a function of the data (an advantage, a "
    "reward), or something is unlearnt, and what its weights should come to is not known. "
    "gradcheck_dist.mark_loss(loss_sum, num_tokens) on the product tells"
)
SHARE_DIGITS = 4
"""Decimals to which shares of tokens are told apart: rounding moves one number by less."""
MEAN_RULES = frozenset({"GS301", "GS302", "GS303", "GS305"})


def spreads_of_losses(contributions: Contributions) -> dict[Place, float]:
    """How far apart, relative, each place puts the weights of the tokens of one contribution at most; infinite where it
    makes some losses smaller and others larger."""
    spreads: dict[Place, float] = {}
    for place, one in _places(contributions):
        spreads[place] = max(spreads.get(place, 0.0), one.spread)
    spreads |= {place: inf for place, signs in _signs(contributions).items() if len(signs) > 1}
    return spreads


def all_weighted(contributions: Contributions) -> bool:
    """Whether each place of a loss gives the tokens of some contribution different weights."""
    spreads = spreads_of_losses(contributions)
    return bool(spreads) and min(spreads.values()) > MAX_SPREAD


def are_batches_of_one(contributions: Contributions) -> bool:
    """Whether the program multiplies all tokens of each contribution by a number of the data, another in some: by the
    advantage of its sequence."""
    shares = set()
    for one in contributions.by_key.values():
        if one.gradient is None or not one.gradient.batch_of_one or not one.gradient.beside_weights:
            return False
        shares.add(round((one.weight or 0.0) / one.gradient.beside_weights, SHARE_DIGITS))
    return len(shares) > 1


def turned(contributions: Contributions) -> frozenset[ContributionKey]:
    """The contributions of places that make the losses of some passes smaller and those of others larger: by
    advantages, or what is to be unlearnt. No normaliser turns a sign in some, so these have weights of their own."""
    places = [place for place, signs in _signs(contributions).items() if len(signs) > 1]
    return frozenset(one.key for place, one in _places(contributions) if place in places)


def _signs(contributions: Contributions) -> dict[Place, set[bool]]:
    """Whether each place makes losses larger."""
    signs: dict[Place, set[bool]] = {}
    for place, one in _places(contributions):
        if one.weight:
            signs.setdefault(place, set()).add(one.weight < 0)
    return signs


def _places(contributions: Contributions) -> Iterator[tuple[Place, Contribution]]:
    for one in contributions.by_key.values():
        if one.loss is not None and one.loss.site is not None:
            yield (one.loss.site.file, one.loss.site.line, one.num_losses), one


def adds_up_apart(spreads: Mapping[Place, float]) -> bool:
    """Whether some pass adds up several losses whose tokens have several weights."""
    return any(spread > MAX_SPREAD and num_losses > 1 for (_, _, num_losses), spread in spreads.items())


def leave_weighted_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no loss, nor what follows all losses, of a factor in steps whose tokens weigh alike by chance."""
    steps: dict[Place, int] = {}
    turning: dict[Place, int] = {}
    for verdict in verdicts:
        for place, spread in verdict.spreads.items():
            if spread > MAX_SPREAD:
                steps.setdefault(place, verdict.context.step)
            if isinf(spread):
                turning.setdefault(place, verdict.context.step)
    for place, signs in _signs_of_steps(verdicts).items():
        if len(signs) > 1:
            turning.setdefault(place, signs[True])
    steps |= turning
    for verdict in verdicts:
        places = steps.keys() & verdict.spreads.keys()
        context = verdict.context
        if not places or context.relative or context.of_samples or context.of_weighted:
            continue
        place = min(places)
        line, step, turns = f"{PurePath(place[0]).name}:{place[1]}", steps[place], place in turning
        drop_of_constants(verdict, (_TURNS if turns else _APART).format(line=line, step=step))


def _signs_of_steps(verdicts: Sequence[StepVerdict]) -> dict[Place, dict[bool, int]]:
    """A step in which each place makes losses larger, and one in which it does not, of those that count tokens."""
    found: dict[Place, dict[bool, int]] = {}
    for verdict in verdicts:
        for place, signs in ({} if verdict.context.relative else _signs(verdict.contributions)).items():
            for larger in signs:
                found.setdefault(place, {}).setdefault(larger, verdict.context.step)
    return found


def drop_of_constants(verdict: StepVerdict, reason: str, spare: str = "") -> None:
    """Leave open, for this reason, what rests on what all of a step's weights together should come to, but for the
    findings of one rule."""
    of_constants = [one for one in verdict.findings if one.severity != "info" and _of_constant(one, verdict)]
    dropped = [one for one in of_constants if one.code != spare]
    if dropped:
        verdict.findings = [one for one in verdict.findings if one not in dropped]
        verdict.effects.clear()
        verdict.reasons.append(reason)


def _of_constant(finding: Finding, verdict: StepVerdict) -> bool:
    """Whether a finding rests on what all of a step's weights together should come to."""
    if any(finding is one for one in verdict.beside_weights):
        return False
    if finding.code in MEAN_RULES or finding.code == "GS101":  # that an average is too many, the loss's constant tells
        return True
    event = finding.first_event
    return (event is not None and event.kind == "loss") or verdict.conduct is not None
