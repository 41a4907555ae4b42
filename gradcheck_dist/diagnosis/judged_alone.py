"""One step judged, and what is kept of it: a long run's verdicts fit into memory and travel between processes.

What is concluded from several steps rests on no more than this, whether a run is judged in memory or step by step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.ledger.buffers import Replay
from gradcheck_dist.ledger.contributions import Contribution, Contributions
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.trace.run import Run

MAX_CONTRIBUTIONS = 512
"""Of more than this, a step that has been judged keeps only the sums."""


def judge_alone(part: Run, step: int, objective: str, objective_from: str) -> StepVerdict:
    """Judge one step and keep what a report needs of it: no replays, and samples only in `reads`."""
    return slim(judge_step(part, step, objective, objective_from))


def slim(verdict: StepVerdict) -> StepVerdict:
    """The verdict without the data that it was made from."""
    contributions = _slim_contributions(verdict.contributions)
    data = verdict.data
    return replace(
        verdict,
        data=StepData(data.step, {}, {}, {}, data.complete),
        contributions=contributions,
        context=replace(verdict.context, contributions=contributions, models=()),
        held=[_slim_held(held) for held in verdict.held],
        without_lost=slim(verdict.without_lost) if verdict.without_lost is not None else None,
        one_batch=slim(verdict.one_batch) if verdict.one_batch is not None else None,
        alone=slim(verdict.alone) if verdict.alone is not None else None,
    )


def _slim_held(held: Held) -> Held:
    """Which parameter on which rank, whether it was seen, and its widest tolerance."""
    widest = [max(held.cells, key=lambda cell: cell.tolerance)] if held.cells else []
    nothing = cast(Replay, None)
    return replace(held, replay=nothing, observed=None, stderr=None, nominal=None, visible=[], cells=widest)


def _slim_contributions(contributions: Contributions) -> Contributions:
    """Tokens and losses, summed over tokens, without the events; of very many only their sums."""
    kept: dict[tuple[int, int, int], Contribution] = {}
    for key, c in contributions.by_key.items():
        value = c.value
        if value is not None and c.loss is not None and c.loss.reduction == "mean":
            value *= c.num_tokens or 0
        kept[key] = replace(c, value=value, loss=None, gradient=None)
    if len(kept) > MAX_CONTRIBUTIONS:
        first, second, *_ = kept.values()
        values = [c.value for c in kept.values() if c.value is not None]
        value = sum(values) if len(values) == len(kept) else None
        whole = replace(first, num_tokens=contributions.num_tokens, value=value)
        rest = replace(second, num_tokens=0, value=0.0 if value is not None else None)
        kept = {first.key: whole, second.key: rest}
    return replace(contributions, by_key=kept)
