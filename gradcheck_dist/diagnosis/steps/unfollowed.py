"""Steps whose gradients are combined or applied where nobody follows them, on purpose: these accuse nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.cells import SIGMAS, Held
from gradcheck_dist.events import KEPT_BY_OPTIMIZER, MOVED_NOTHING, MOVES_NOW, OptimizerStep, ProbeStatus, Reduce
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.wording import numbered, plural

NOT_ATTACHED = "was never put into its own .grad"
ABSENT = 1e-3
"""Share of the largest weight below which a contribution is not there."""


def from_before(measured: Sequence[Held]) -> str | None:
    """Why a step is left open whose optimizer reads only gradients that had been emptied from their buffers, and none
    of those that came after that: they were kept to be applied a step later, while the next ones are on their way.
    Which tokens belong to which step only the trainer knows."""
    delayed: set[int] = set()
    for held in measured:
        if held.observed is None or held.stderr is None or held.nominal is None:
            continue
        size = float(np.nanmax(np.abs(held.observed), initial=0.0))
        there = np.abs(held.observed) > ABSENT * size + SIGMAS * held.stderr
        documented = (held.nominal != 0) & np.isfinite(held.observed)
        if not there.any():
            continue
        if (there & documented).any() or not documented.any():
            return None
        delayed.update(held.ranks)
    if not delayed:
        return None
    return (
        f"on {numbered('rank', delayed)} the optimizer reads gradients of passes that were emptied "
        "from their buffers before, and nothing of those that came afterwards: where gradients are applied a step late "
        "(to overlap their reduction), that is meant, and which tokens belong to which step is not known"
    )


def moving(data: StepData) -> list[str]:
    """What is told of optimizers that had moved no parameter before, and do so in every step now."""
    statuses = (event for of_rank in data.events.values() for event in of_rank if isinstance(event, ProbeStatus))
    return [event.reason for event in statuses if event.probe == KEPT_BY_OPTIMIZER and event.active]


def without_keepers(verdicts: list[StepVerdict]) -> list[StepVerdict]:
    """Leave all steps open where an optimizer keeps what it reads in one of them, to move parameters in a later one:
    what several of its steps add up to, and what that is divided by, only it knows. One that moves them in each step
    from then on only began its state: its steps are judged."""
    told = [(words, one) for one in verdicts for words in one.reasons if MOVED_NOTHING in words]
    moves = Counter(words.removesuffix(MOVES_NOW) for one in verdicts for words in one.remarks if MOVES_NOW in words)
    stopped = Counter(words.removesuffix(MOVED_NOTHING) for words, _ in told)
    began = {words for words, _ in told if moves[name := words.removesuffix(MOVED_NOTHING)] >= stopped[name]}
    for verdict in verdicts:
        first = [f"{words}, and did in the steps after it" for words in verdict.reasons if words in began]
        verdict.reasons = [words for words in verdict.reasons if words not in began]
        verdict.remarks = [words for words in verdict.remarks if MOVES_NOW not in words]
        verdict.remarks += [f"step {verdict.context.step}: {words}" for words in dict.fromkeys(first)]
    kept = {one.context.step: words for words, one in told if words not in began}
    if kept:
        step, words = min(kept.items())
        reason = (
            f"step {step}: {words}. Either it adds up the gradients of several steps (accumulation in its own state, "
            "virtual steps), and what it divides their sum by is not followed, or something else moves its parameters "
            "(a hook): no step is judged alone"
        )
        for verdict in verdicts:
            verdict.findings, verdict.changes, verdict.without_lost, verdict.alone = [], [], None, None
            verdict.reasons = [reason, *(words for words in verdict.reasons if MOVED_NOTHING not in words)]
    return verdicts


def not_attached(data: StepData) -> list[str]:
    """Why a step is left open in which a rank steps without a gradient for parameters that another rank's optimizer
    lists in the same place, and whose gradients that one reduced over both: what the first put into the reduction
    (zeros for a module that its batch did not reach) was never given to its own parameter, so that copies part."""
    steps = {
        rank: [event for event in events if isinstance(event, OptimizerStep)] for rank, events in data.events.items()
    }
    listed = {rank: data.params_of(rank, of_rank[0].params) for rank, of_rank in steps.items() if len(of_rank) == 1}
    groups = {
        (rank, param): event
        for rank, events in data.events.items()
        for event in events
        if isinstance(event, Reduce) and event.root is None
        for param in data.params_of(rank, event.params)
    }
    read = {
        (rank, track.param.id)
        for of_key in data.tracks.values()
        for rank, track in of_key.items()
        if any(point.seq == step.seq for step in steps.get(rank, ()) for point in track.points)
    }
    found: dict[tuple[int, int], list[int]] = {}
    for rank, mine in listed.items():
        empty = [index for index, param in enumerate(mine) if (rank, param) not in read]
        if not empty or len(empty) != steps[rank][0].grads_missing:
            continue  # nothing is missing, or not every gradient was sampled
        for other, theirs in listed.items():
            joined = [groups.get((other, theirs[index])) for index in empty] if len(theirs) == len(mine) else []
            num = sum(
                event is not None and rank in event.group and other != rank and (rank, mine[index]) not in groups
                for index, event in zip(empty, joined, strict=False)
            )
            if num:
                found.setdefault((rank, num), []).append(other)
    return [
        f"rank {rank} steps without a gradient for {plural(num, 'parameter')} whose gradients "
        f"{numbered('rank', others)} reduced together with it: what it gave to that reduction {NOT_ATTACHED}, so "
        "its copies stay as they are while the others move"
        for (rank, num), others in sorted(found.items())
    ]
