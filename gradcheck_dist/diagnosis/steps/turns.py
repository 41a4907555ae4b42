"""Optimizers that step in turn (an actor's and a critic's, a GAN's), of which one stepped in a single judged step.

What one of its steps leaves for its next one, gradients that nobody empties, shows in that next step alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradcheck_dist.events import OptimizerStep, ZeroGrad
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.wording import plural

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

MOST = 8
"""Optimizers that step in turn."""


@dataclass(frozen=True)
class Turn:
    """Ids of the parameters that the step's optimizer read on the first rank, and of those whose gradients were emptied
    there in the step."""

    read: frozenset[int]
    emptied: frozenset[int]


def turn_of(data: StepData) -> Turn | None:
    """Whose turn a step is; None where not exactly one optimizer stepped."""
    rank = min(data.events, default=None)
    if rank is None:
        return None
    steps = [event for event in data.events[rank] if isinstance(event, OptimizerStep) and event.inside is None]
    if len(steps) != 1:
        return None
    emptied = [event for event in data.events[rank] if isinstance(event, ZeroGrad)]
    return Turn(
        frozenset(data.params_of(rank, steps[0].params)),
        frozenset(id for event in emptied for id in data.params_of(rank, event.params)),
    )


def tell_turns(verdicts: Sequence[StepVerdict]) -> list[str]:
    """In words: that some optimizers stepped once in the first steps, that nobody was seen to empty what they read, and
    how to record a second step of each; nothing where other steps were asked for."""
    turns = [verdict.turn for verdict in verdicts]
    if [verdict.context.step for verdict in verdicts] != list(range(len(verdicts))):
        return []
    emptied = frozenset().union(*(turn.emptied for turn in turns if turn is not None))
    times = Counter(turn.read for turn in turns if turn is not None)
    once = [read for read, num in times.items() if num == 1 and not read <= emptied]
    if None in turns or not 1 < len(times) <= MOST or not once:
        return []
    return [
        f"{plural(len(times), 'optimizer')} step in turn, {len(once)} of them once in these steps: gradients that "
        f"nobody empties before the next one do not show; --steps 0:{2 * max(len(times), len(verdicts))} records it"
    ]
