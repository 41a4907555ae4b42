"""Backward passes that every step throws away: on lines of their own, or in front of all that it keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, Thrown
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Backward
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.discarded import emptied_at
from gradcheck_dist.ledger.one_forward import forwards_of
from gradcheck_dist.ledger.tracks import Slot, StepData
from gradcheck_dist.records import Site
from gradcheck_dist.wording import numbered

OR_LOST = "their tokens are lost: which is true is not known"
LEFT_OVER = "left over from an epoch that did not fill its last window"
LEAST_KEPT = 2
UNCOUNTED = "sum"
"""The objective by which a step is right whatever number of passes it keeps."""


class Lines(NamedTuple):
    """Where a pass's loss was evaluated and its backward was called; None where that was not seen."""

    loss: Site | None
    backward: Site | None


def thrown_away(data: StepData, objective: str, recorded: Contributions, kept: Contributions) -> Thrown | None:
    """What may be meant by the passes that a step throws away, where it is right without them."""
    return _at_own_lines(data, recorded, kept) or _before_a_window(data, objective, recorded, kept)


def _before_a_window(data: StepData, objective: str, recorded: Contributions, kept: Contributions) -> Thrown | None:
    """The passes that came in front of several which the step keeps, and by whose number, or tokens, it divides: a
    zero_grad in the wrong place leaves a divisor that counts what it emptied. One pass of a line that is kept alone, or
    several of one forward pass, tell nothing, for they divide by no number of batches."""
    first: dict[int, int] = {}
    steps: dict[tuple[int, Site | None], set[int]] = defaultdict(set)
    for (data_rank, step, _), one in kept.by_key.items():
        steps[data_rank, one.loss.site if one.loss is not None else None].add(step)
        first[data_rank] = min(step, first.get(data_rank, step))
    lost = recorded.by_key.keys() - kept.by_key.keys()
    if objective == UNCOUNTED or not lost or any(len(of_line) < LEAST_KEPT for of_line in steps.values()):
        return None
    if forwards_of(data, recorded.by_key):
        return None
    if any(step >= first.get(data_rank, 0) for data_rank, step, _ in lost):
        return None
    return Thrown(
        f"what the first passes leave is emptied before the others begin{emptied_at(data)}",
        f"may be {LEFT_OVER}, or from a step that was skipped",
    )


def _at_own_lines(data: StepData, recorded: Contributions, kept: Contributions) -> Thrown | None:
    """The passes that the step throws away, if none of those that it keeps goes through the same lines."""
    lines: dict[bool, set[Lines]] = {True: set(), False: set()}
    for rank, events in data.events.items():
        for event in events:
            if isinstance(event, Backward):
                key = (recorded.coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
                loss = recorded.by_key[key].loss if key in recorded.by_key else None
                lines[key in kept.by_key].add(Lines(loss.site if loss is not None else None, event.site))
    lost = lines[False]
    if not lost or any(None in line for line in lost) or lost & lines[True]:
        return None
    found = sorted({line.backward.short for line in lost if line.backward is not None})
    return Thrown(
        f"the gradients that come from {in_short(found)} are emptied before the optimizer comes{emptied_at(data)}",
        "may be meant for something else (statistics, an attack on the input)",
    )


def _chosen_among(verdicts: Sequence[StepVerdict]) -> str:
    """What is told of steps of the same passes, each of which is right but for passes that it leaves out, others than
    other steps, also behind one that it keeps: a line in a wrong place empties the same in all, or all that came
    before it; a choice (gradients that agree, no outliers) does not. "" where that is not so."""
    passes = {frozenset(verdict.contributions.by_key) for verdict in verdicts}
    kept_aside = False
    left_out: dict[int, frozenset[Slot]] = {}
    for verdict in verdicts:
        without = verdict.without_lost
        if without is None or without.findings or not without.comes_out_right or not without.all_right:
            return ""
        lost = verdict.contributions.by_key.keys() - without.contributions.by_key.keys()
        left_out[verdict.context.step] = frozenset(key[1:] for key in lost)
        kept_aside |= any(key < one and key[0] == one[0] for key in without.contributions.by_key for one in lost)
    if not kept_aside or len(passes) != 1 or len(set(left_out.values())) < 2 or not all(left_out.values()):
        return ""
    told = [
        f"{in_short([str(k) for k in sorted({slot[0] for slot in of_step})])} of step {step}"
        for step, of_step in left_out.items()
    ]
    return (
        f"the gradients of accumulation steps {in_short(told)} are not in what the optimizer reads, others in each "
        "step, and all other tokens weigh what they should without these: a choice among gradients that are kept aside "
        f"(those that agree, or are no outliers) does that; if all belong to the step, {OR_LOST}"
    )


def leave_thrown_away_open(verdicts: Sequence[StepVerdict]) -> list[StepVerdict]:
    """The steps as they are without what each of them throws away, every other token weighing what it should without
    it. So statistics of gradients are taken, and attacks on the input computed from another batch, at lines of their
    own; so the rest of an epoch goes. A step that loses what belongs to it divides by its tokens as well, or loses what
    one line of a loop made. One that is wrong all the same has fewer findings without it, where it has a fault of its
    own beside other steps that are right."""
    thrown = next((verdict.thrown for verdict in verdicts if verdict.thrown is not None), None)
    chosen = [
        verdict.without_lost
        for verdict in verdicts
        if verdict.without_lost is not None
        if verdict.thrown is not None or len(verdict.without_lost.findings) < len(verdict.findings)
    ]
    if left_out := _chosen_among(verdicts):
        chosen = [verdict.without_lost for verdict in verdicts if verdict.without_lost is not None]
        chosen[0].reasons.append(left_out)
        return chosen
    if thrown is None or len(chosen) < len(verdicts):
        return list(verdicts)
    chosen[0].reasons.append(
        f"{numbered('step', [one.context.step for one in chosen])}: {thrown.where}. All other tokens weigh what they "
        f"should without these passes, so that they {thrown.meant}; if they belong to the step, {OR_LOST}"
    )
    return chosen
