"""Passes whose gradients the program keeps apart and puts together itself, in some step by numbers that it computes.

Gradient surgery (PCGrad) runs a forward pass for each task, keeps its gradient, empties the buffers and projects the
gradients on one another. Where none of them conflict nothing but their sum is left, which looks like an accumulation
whose division is missing: each pass is a mean over its own tokens, and all are added up. The steps in which the same
run combines passes by unlike numbers show that these are tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from fractions import Fraction

import numpy as np

from gradcheck_dist.diagnosis.steps.step_verdict import KeptApart, StepVerdict, cause
from gradcheck_dist.diagnosis.weights.cells import Held, judge
from gradcheck_dist.diagnosis.weights.written import Measured, distinct
from gradcheck_dist.events import Backward
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.expected import expected_weights

TASKS = (
    "tasks of their own, this is right: gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) on "
    "each tells"
)
SAME = 1e-3
GONE = 1e-3
"""A weight, relative to the largest, that is as good as none."""


def leave_tasks_open(verdicts: Sequence[StepVerdict]) -> None:
    """Take back what losses are accused of that are means over their own tokens, where another step of the run, or the
    same one, combines such passes by numbers computed from them; unless they weigh another number as tasks, too."""
    combines = any(map(_combines, verdicts))
    for verdict in verdicts:
        kept = verdict.kept_apart
        sums = [one for one in verdict.errors if one.first_event is not None and one.first_event.kind == "loss"]
        sums = [one for one in sums if cause(one) in verdict.shapes]
        if not sums or kept is None:
            continue
        if combines and (kept.right or kept.unlike):
            for finding in sums:
                verdict.take_away(finding)
            verdict.reasons.append(
                "the gradients of passes are kept apart, and the program combines them by numbers that it computes. "
                f"Each is a mean over its own tokens: too much where they are parts of one batch. If they are {TASKS}"
            )
        elif kept.right:
            for finding in sums:
                finding.explanation += f" The gradients of these passes are kept apart: if they are {TASKS}."


def _combines(verdict: StepVerdict) -> bool:
    """Whether lines that nobody records multiply passes that are kept apart by numbers that are no constants."""
    known = {id(finding) for finding in verdict.findings}
    computed = [change for change in verdict.changes if id(change.finding) not in known]
    for change in computed if verdict.kept_apart is not None else ():
        found: dict[object, dict[object, Measured]] = defaultdict(dict)
        for (param, rank, key), factor in change.factors.items():
            found[param, rank, key[0]][key[1:]] = factor
        num_passes = verdict.kept_apart.num_passes if verdict.kept_apart is not None else 1
        if any(len(of) < num_passes or len(distinct(list(of.values()))) > 1 for of in found.values()):
            return True
    return False


def kept_apart(verdict: StepVerdict) -> KeptApart | None:
    """What is known of a step where all passes but the last were handed to the program, or gone from `.grad` when the
    last was there, and are in what the optimizer reads for all that; None for all others."""
    recorded = verdict.contributions
    returned: set[ContributionKey] = {
        (recorded.coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
        for rank, events in verdict.data.events.items()
        for event in events
        if isinstance(event, Backward) and event.returned
    }
    passes = {key[1:] for key in recorded.by_key}
    earlier = {key for key in recorded.by_key if key[1:] != max(passes)}
    if not earlier or not (earlier <= returned or any(_came_back(held, earlier) for held in verdict.held)):
        return None
    weights = _as_tasks(verdict)
    right = bool(weights) and max(abs(weight - 1) for weight in weights) <= SAME
    unlike = _are_means(verdict) and len(distinct([(weight, SAME) for weight in weights])) > 1
    return KeptApart(len(passes), right, unlike)


def _as_tasks(verdict: StepVerdict) -> list[float]:
    """What the weights of a step are of those that they should be where each pass has an objective of its own."""
    tokens = {key: one.num_tokens for key, one in verdict.contributions.by_key.items() if one.num_tokens is not None}
    own: dict[ContributionKey, Fraction] = {}
    for slot in {key[1:] for key in tokens}:
        of_pass = {key: count for key, count in tokens.items() if key[1:] == slot}
        own |= expected_weights(verdict.context.objective, of_pass)
    cells = [cell for held in judge(verdict.held, verdict.contributions, own) for cell in held.cells]
    return [1.0 if cell.right else cell.ratio for cell in cells]


def _are_means(verdict: StepVerdict) -> bool:
    """Whether all losses weigh the same number of means over their own tokens."""
    weights = [(one.weight or 0.0) * (one.num_tokens or 0) for one in verdict.contributions.by_key.values()]
    return bool(weights) and min(weights) > 0 and max(weights) <= min(weights) * (1 + SAME)


def _came_back(held: Held, keys: Set[ContributionKey]) -> bool:
    """Whether nothing of a rank's own contributions among these was in a gradient when its others were, and all are in
    the end. Asked of the buffer that the optimizer reads: what a pass brings is alone before FSDP adds it to that."""
    basis, final = held.replay.basis, held.replay.final(held.rank)
    own = [column for column, origin in enumerate(basis.origin) if origin == held.rank]
    earlier = [column for column in own if basis.keys[column] in keys]
    others = [column for column in own if basis.keys[column] not in keys]
    if held.observed is None or final is None or not earlier or not others:
        return False
    history = (entry for entry in held.replay.history(held.rank) if entry.sampled and entry.buffer == final.buffer)
    states = (entry.observed for entry in history if entry.observed is not None)
    gone = any(_largest(state[earlier]) <= GONE * _least(state[others]) for state in states)
    return gone and _least(held.observed[earlier]) > GONE * _largest(held.observed)


def _largest(weights: np.ndarray) -> float:
    return float(np.abs(weights).max())


def _least(weights: np.ndarray) -> float:
    return float(np.abs(weights).min())
