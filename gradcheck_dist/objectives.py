"""The names of objectives: what one step's gradient can be meant to be. Imports nothing but the errors."""

from __future__ import annotations

from gradcheck_dist.errors import unknown_value

OBJECTIVE_NAMES = ("global-token-mean", "microbatch-mean", "rank-token-mean", "sum", "sequence-mean")
"""ledger/expected.py has the formula of each."""
DEFAULT_OBJECTIVE = "global-token-mean"


def check_objective(name: str) -> str:
    """The name itself.

    Raises:
        GradcheckError: E401 no such objective.
    """
    if name not in OBJECTIVE_NAMES:
        raise unknown_value(
            "objective", name, OBJECTIVE_NAMES, code="E401", hint="Name what one step's loss should be."
        )
    return name
