"""Lines of the trainer's own that multiply each gradient by a number of its own, just before the optimizer.

A clip by parameter, a trust ratio. What else is wrong with the weights shows once they are freed of these numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradcheck_dist.diagnosis.causes.blame import accounted
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import SIGMAS, Held
from gradcheck_dist.diagnosis.weights.written import Measured, distinct, is_written
from gradcheck_dist.events import Clip, OptimizerStep
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import ParamKey, StepData

Gradient = tuple[ParamKey, int]
"""A parameter, and the rank that holds its gradient."""
EXACT = 1e-5
"""Relative: the least that factors are known to."""
SEVERAL = 2
"""Numbers that nobody writes; one alone may be a forgotten constant's."""


def is_last(case: Case) -> bool:
    """Whether it is what nobody recorded just before the optimizer, or its clip."""
    return case.culprit.unrecorded and isinstance(case.culprit.before, OptimizerStep | Clip)


def of_params(
    cases: Sequence[Case], judged: Sequence[Held], data: StepData, contributions: Contributions
) -> dict[Gradient, float] | None:
    """What the last lines before the optimizer multiplied each gradient by, alike in all of what it holds; None where
    they did not, or all these numbers may be the program's constants."""
    num_last = sum(map(is_last, cases))
    if num_last in (0, len(cases)):
        return None
    found: dict[Gradient, list[Measured]] = defaultdict(list)
    for one in accounted(data, contributions, judged):
        gap = one.account.gaps[-1] if one.account.gaps else None
        if gap is not None and isinstance(gap.end, OptimizerStep | Clip) and not gap.inside and not one.gone:
            found[one.held.param, one.held.rank].append((gap.factor, EXACT + SIGMAS * gap.noise))
    values = {key: distinct(factors) for key, factors in found.items()}
    if any(len(of_key) != 1 or of_key[0][0] <= 0 for of_key in values.values()):
        return None
    quantities = cases[0].context.quantities
    numbers = distinct([of_key[0] for of_key in values.values()])
    computed = [number for number in numbers if not is_written(*number, quantities)]
    return {key: of_key[0][0] for key, of_key in values.items()} if len(computed) >= SEVERAL else None


def freed_of_params(measured: Sequence[Held], factors: Mapping[Gradient, float]) -> list[Held]:
    """What was measured, freed of these numbers."""
    return [held.freed(factors.get((held.param, held.rank), 1.0)) for held in measured]
