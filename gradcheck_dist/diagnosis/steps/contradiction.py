"""A step whose records pass every check and still contradict each other: it is left open, the others are judged."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.context import step_context
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.trace.run import Run

P = ParamSpec("P")
Judge = Callable[Concatenate[Run, int, str, str, P], StepVerdict]


def left_open(judge: Judge[P]) -> Judge[P]:
    """A judge of one step for which records that do not fit together are a reason, and no end of the whole diagnosis.

    The reason names the step and, for a bug report, the place where the contradiction came up.
    """

    @wraps(judge)
    def guarded(
        run: Run, step: int, objective: str, objective_from: str, /, *args: P.args, **kwargs: P.kwargs
    ) -> StepVerdict:
        try:
            return judge(run, step, objective, objective_from, *args, **kwargs)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            MemoryError,
            StopIteration,
            TypeError,
            ValueError,
        ) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            contributions = Contributions()
            context = step_context(run, step, {}, contributions, objective, objective_from)
            verdict = StepVerdict(context, StepData(step, {}, {}, {}, True), contributions)
            verdict.reasons.append(
                f"step {step} cannot be judged: what the ranks recorded of it does not fit together. If gradcheck "
                "recorded it and nobody changed it since, this is a bug: please report it, with "
                f"{Path(place.filename).name}:{place.lineno}"
            )
            return verdict

    return guarded
