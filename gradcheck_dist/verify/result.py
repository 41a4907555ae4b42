"""What was found about one target of one module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradcheck_dist.verify.difference import Outcome
from gradcheck_dist.verify.targets import Target

Shape = Literal["", "scaled", "cut", "constant", "flat", "other", "partial"]
ARRIVED = "the gradients that arrive at its output differ between ranks that hold the same output: look behind it"
INSIDE = "a module inside is wrong: mend it and verify again"


@dataclass(frozen=True)
class Result:
    """What was found about one target. `observed` is autograd's derivative along a direction, `numerical` the
    differences', both in the unit of the function; `factor` is observed / numerical where that is one number.

    `shape`: "scaled" by one factor, "cut" (no gradient although the output depends on it), "constant" (the same
    gradient whatever arrives), "flat" (a gradient although the output does not depend on it), "other"; "partial": right
    as a summand of the sum over `ranks`; `left_unsummed`: an input's gradient that is one although all ranks hold the
    same outputs and the same gradients of them. Right where the caller sums. `seen`: fingerprints of that input, or of
    the outputs where ARRIVED is the reason.
    """

    path: str
    target: Target
    outcome: Outcome
    observed: float | None = None
    numerical: float | None = None
    error: float | None = None
    factor: float | None = None
    precision: str = ""
    shape: Shape = ""
    ranks: tuple[int, ...] = ()
    reason: str = ""
    left_unsummed: bool = False
    seen: tuple[list[float], ...] = ()
