"""A factor that degrees and counts surely make up is a constant that somebody wrote, and no norm's."""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.vocabulary import RANKS
from gradcheck_dist.diagnosis.weights.factors import Name, chance

SIMPLE = 3.5
"""What a name may cost."""
SURE = 0.005
"""Clips are far more frequent than forgotten constants: chance must make a name more seldom than elsewhere."""
SURE_OF_RANKS = 0.1


def is_constant(case: Case) -> bool:
    """Whether a case's factor is surely a constant of degrees and counts."""
    return any(name.cost < SIMPLE and _surely(name, case) for name in case.names)


def _surely(name: Name, case: Case) -> bool:
    """Whether a name tells a constant from a norm: chance makes some names often. Where ranks were combined in the
    bracket, a number of ranks is no chance."""
    miss = max(abs(name.value / case.pattern.factor - 1), case.pattern.tolerance)
    expected = case.combined_unseen and len(name.powers) == 1 and name.powers[0][0] in RANKS
    return chance(name, case.context.quantities, miss) < (SURE_OF_RANKS if expected else SURE)
