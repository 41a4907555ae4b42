"""Brackets around two causes of which either may be the one, from the earlier event to the later; and what a clip may
hide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.causes.account import Hand
from gradcheck_dist.diagnosis.causes.culprit import Culprit, blame_loss
from gradcheck_dist.diagnosis.causes.places import kind_of
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.causes.vocabulary import GAP, LOSSES, Explanation
from gradcheck_dist.events import Event
from gradcheck_dist.ledger.contributions import Contributions

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.causes.explanations import Search
    from gradcheck_dist.diagnosis.causes.hands import Judged

MOST_FACTORS = 16
"""So many factors of a bracket are compared with those of others."""


def widen(
    contributions: Contributions, one: Judged, unseen: Mapping[Hand, Culprit], cause: Hand, instead: Hand
) -> None:
    """One cause is as good an explanation as the other: the bracket has both."""
    ends = [_ends(contributions, one, unseen, each) for each in (cause, instead)]
    if None in ends:
        return
    (mine, first, last), (theirs, start, end) = ends  # type: ignore[misc]
    if LOSSES in (cause, instead):
        earliest, before = (mine, end) if cause == LOSSES else (theirs, last)
    else:
        earliest = mine if first.seq <= start.seq else theirs
        before = max((last, end), key=lambda event: event.seq if event is not None else float("inf"))
    both = cause[0] == instead[0] == GAP and mine.factor is not None and theirs.factor is not None
    for index, (culprit, share) in enumerate(one.shares):
        if culprit.identity == mine.identity:
            factor = mine.factor if cause[0] == GAP else share
            if both:
                factor = mine.factor * theirs.factor  # type: ignore[operator]
            widened = replace(
                earliest, factor=factor, nominal=1.0, unrecorded=True, before=before, rivals=culprit.rivals
            )
            one.shares[index] = (widened, share)


def hidden(search: Search, chosen: Explanation, hand: Hand) -> tuple[float, ...]:
    """Beside a clip: what explanations as good, in which its lines divide by another number besides, make of the
    losses' factor, relative to what the chosen one makes of it."""
    divided = {
        other: edit.reference if edit.mode == "clipped" else 1.0
        for other in (chosen, *search.tied)
        for edit in other.edits
        if edit.hand == hand
    }
    if hand not in search.clips or chosen not in divided or chosen.loss is None:
        return ()
    others = [other for other in divided if other.causes == chosen.causes and other.loss is not None]
    return tuple(divided[other] / divided[chosen] for other in others if divided[other] != divided[chosen])


def _ends(
    contributions: Contributions, one: Judged, unseen: Mapping[Hand, Culprit], cause: Hand
) -> tuple[Culprit, Event, Event | None] | None:
    """A cause of this weight's as a culprit, and the events between which it acted; None when it did nothing here."""
    if cause in unseen and unseen[cause].event is not None:
        return unseen[cause], unseen[cause].event, unseen[cause].before  # type: ignore[return-value]
    if cause == LOSSES:
        loss = blame_loss(contributions.by_key[one.cell.key], one.account.root)
        return (loss, loss.event, loss.event) if loss.event is not None else None
    step = next((step for step in one.account.steps if step.hand == cause), None)
    return None if step is None else (Culprit(kind_of(step.event), step.rank, step.event), step.event, step.event)


def merge(wrong: Sequence[Judged]) -> None:
    """One cause seen in several brackets is one: the same factor, from the same line on or up to the same line, is told
    by the narrowest. A bracket may have several factors, as a count of each rank's own has."""
    shares = [(one, index) for one in wrong for index in range(len(one.shares)) if not one.shares[index][0].absent]
    chosen: list[tuple[Culprit, float, float, bool]] = []
    for one, index in sorted(shares, key=lambda item: _width(item[0].shares[item[1]][0])):
        culprit, share = one.shares[index]
        emptied = one.gone and abs(share) <= SAME  # known to no digit: what came out right seems alike, and is not
        close = [
            known
            for known, factor, tolerance, right in chosen
            if not (emptied and right)
            and abs(share - factor) <= (tolerance + one.tolerance) * max(abs(factor), abs(share), 1e-12)
        ]
        for known in close:
            joined = known.start == culprit.start or (known.end is not None and known.end == culprit.end)
            if joined and known.identity != culprit.identity:
                one.shares[index] = (known, share)
                break
        else:
            again = any(known.identity == culprit.identity for known in close)
            if not again and sum(known.identity == culprit.identity for known, *_ in chosen) < MOST_FACTORS:
                chosen.append((culprit, share, one.tolerance, one.cell.right))


def _width(culprit: Culprit) -> int:
    """How much was recorded within a bracket; 0 for an event."""
    first, last = culprit.event, culprit.before
    return last.seq - first.seq if culprit.unrecorded and first is not None and last is not None else 0
