"""What first shows after copies were set apart is a consequence of that, and no cause of its own.

Ranks that hold copies of a parameter go on alike as long as they step alike. Once a step gave them unequal gradients,
their activations differ in the next one, and what arrives at copies and behind exchanges is no longer one gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradcheck_dist.diagnosis.audits.unlike_updates import GONE_APART
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.ledger.apart import drifted_between
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import numbered

SET_APART = "others when the next step begins: ranks step by learning rates of their own"
DRIFTED = "what was not recorded in between gave each rank updates of its own"
UPDATES = "GS107"
SETS_APART = frozenset({"GS103", UPDATES, "GS601", "GS602", "GS607", "GS608", "GS609", "GS703", "GS802"})
"""What gives ranks that hold copies unequal updates: parts that are not summed, coefficients and skips of their own."""
FOLLOWS = frozenset({"GS000", "GS103", "GS105", UPDATES, "GS703", "GS802"})
"""What copies that have drifted apart look like; what began at zero is a rank's own updates alone, and unlike."""


def set_apart(judged: Iterable[Held]) -> frozenset[ParamKey]:
    """Parameters in whose copies the optimizers of two ranks read other weights of one contribution, or one of them
    what was left from an earlier step as well."""
    found: set[ParamKey] = set()
    first: dict[tuple[ParamKey, ContributionKey], Cell] = {}
    left: dict[ParamKey, bool] = {}
    for held in judged:
        final = held.replay.final(held.rank)
        if final is not None and left.setdefault(held.param, final.leftover) != final.leftover:
            found.add(held.param)
        for cell in held.cells:
            other = first.setdefault((held.param, cell.key), cell)
            if abs(cell.ratio - other.ratio) > cell.margin + other.margin:
                found.add(held.param)
    return frozenset(found)


def leave_drift_between_open(run: Run, verdicts: Sequence[StepVerdict]) -> None:
    """Leave open what happened in steps that were not recorded, where copies went in alike and came out unlike. That
    they are unlike from there on is a consequence."""
    accused = any(
        one.code in SETS_APART and not one.pattern.startswith(GONE_APART)
        for verdict in verdicts
        for one in verdict.errors
    )
    found = None if accused else drifted_between(run, [verdict.context.step for verdict in verdicts])
    if found is None:
        return
    for verdict in verdicts:
        for one in [one for one in verdict.findings if one.pattern.startswith(GONE_APART)]:
            verdict.take_away(one)
    first, last = found.before + 1, found.behind
    verdict = next(one for one in verdicts if one.context.step == found.behind)
    verdict.reasons.append(
        f"{numbered('rank', found.ranks)} updated the same parameters alike in step {found.before}, and hold other "
        f"values than one another when step {last} begins: {DRIFTED}, as a missing reduction does. --steps "
        f"{first}:{last} records {'it' if last - first == 1 else 'them'}"
    )


def leave_drift(verdicts: Sequence[StepVerdict]) -> None:
    """Take findings away that no step showed up to the first in which copies were set apart, be that a finding or left
    open. Where ranks of one batch train on the sum of their losses, that shows no more then: any finding may be due to
    their being read as one loss. Where all gradients were right and parameters came out unlike, the updates did it."""
    known: set[object] = set()
    since: tuple[int, str] | None = None
    any_follows = False
    before: StepVerdict | None = None
    by_update = False
    for verdict in sorted(verdicts, key=lambda one: one.context.step):
        if since is None and before is not None and _updates_set_apart(before, verdict):
            since, by_update = (before.context.step, "updates of each rank's own"), True
        told = [one for one in verdict.findings if by_update and one.code == UPDATES]
        if since is not None:
            late = [
                one
                for one in verdict.findings
                if (any_follows or one.code in FOLLOWS) and cause(one) not in known and one not in told
            ]
            verdict.findings = [one for one in verdict.findings if one not in late]
            verdict.remarks += [
                f"step {verdict.context.step}: {one.code} shows there for the first time, after {since[1]} in step "
                f"{since[0]}, which lets copies of parameters drift apart: taken for its consequence"
                for one in late
            ]
            verdict.reasons += [_of_updates(since[0])] if late and by_update and not told else []
        known |= {cause(finding) for finding in verdict.findings}
        apart = [one.code for one in verdict.findings if one.code in SETS_APART and one.severity == "error"]
        if since is None and (apart or verdict.apart):
            since = verdict.context.step, apart[0] if apart else "unequal gradients of copies"
            any_follows = verdict.summed
        before = verdict


def _updates_set_apart(before: StepVerdict, verdict: StepVerdict) -> bool:
    """Whether ranks held the same parameters when a step began, all gradients that show here were right in it, and they
    hold others when the next one begins."""
    judged, known = ({held.param for held in one.held if held.cells} for one in (verdict, before))
    next_to = verdict.context.step == before.context.step + 1 and before.begun_alike and verdict.begun_alike is False
    return bool(next_to) and before.comes_out_right and not before.findings and before.all_right and judged <= known


def _of_updates(step: int) -> str:
    return (
        f"ranks held the same parameters in step {step} and their optimizers read right gradients, and yet they hold "
        f"{SET_APART}, or draw numbers in it. Where they are to train one model that is wrong, and where each tries "
        "other settings it is meant: what gradients should be then is not judged"
    )


def leave_own_parts_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no gradients of lacking other ranks' contributions in a step where they are alike with those of later
    steps, of which the way in which they began told that ranks hand on what they step by parts of their own."""
    told = {reason for verdict in verdicts for reason in verdict.reasons}
    for verdict in verdicts:
        if verdict.own_parts in told and verdict.own_parts not in verdict.reasons:
            for finding in [one for one in verdict.findings if cause(one) in verdict.shapes]:
                verdict.take_away(finding)
            verdict.reasons.append(verdict.own_parts)
