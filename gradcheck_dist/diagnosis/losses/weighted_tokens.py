"""Losses that weigh tokens apart (by document, source or task): which of their steps say nothing of a normaliser.

Where tokens of one contribution have different weights, the program weighs tokens, and what all weights together should
come to is not known. A contribution, or a whole step, whose tokens happen to weigh alike (all of one source) was
weighted by the same line: its weight is one of the program's numbers, and no normaliser that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.weights.cells import MAX_SPREAD
from gradcheck_dist.ledger.contributions import Contributions

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Finding
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

Place = tuple[str, int, int]
"""File and line of a loss, and how many losses its pass adds up: further ones may be of another coefficient."""
MEAN_RULES = frozenset({"GS301", "GS302", "GS303", "GS305"})


def spreads_of_losses(contributions: Contributions) -> dict[Place, float]:
    """How far apart, relative, each place puts the weights of the tokens of one contribution at most."""
    spreads: dict[Place, float] = {}
    for one in contributions.by_key.values():
        if one.loss is not None and one.loss.site is not None:
            place = (one.loss.site.file, one.loss.site.line, one.num_losses)
            spreads[place] = max(spreads.get(place, 0.0), one.spread)
    return spreads


def all_weighted(contributions: Contributions) -> bool:
    """Whether each place of a loss gives the tokens of some contribution different weights."""
    spreads = spreads_of_losses(contributions)
    return bool(spreads) and min(spreads.values()) > MAX_SPREAD


def adds_up_apart(spreads: Mapping[Place, float]) -> bool:
    """Whether some pass adds up several losses whose tokens have several weights."""
    return any(spread > MAX_SPREAD and num_losses > 1 for (_, _, num_losses), spread in spreads.items())


def leave_weighted_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no loss, nor what follows all losses, of a factor in steps whose tokens weigh alike by chance."""
    steps: dict[Place, int] = {}
    for verdict in verdicts:
        for place, spread in verdict.spreads.items():
            if spread > MAX_SPREAD:
                steps.setdefault(place, verdict.context.step)
    for verdict in verdicts:
        places = steps.keys() & verdict.spreads.keys()
        context = verdict.context
        if not places or context.relative or context.of_samples or context.of_weighted:
            continue
        place = min(places)
        drop_of_constants(
            verdict,
            f"the loss at {PurePath(place[0]).name}:{place[1]} gives tokens of one contribution different weights in "
            f"step {steps[place]}: what its weights should come to where they happen to be equal is not known. "
            "gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) on each loss tells",
        )


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
