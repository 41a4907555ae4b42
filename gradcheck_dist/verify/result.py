"""What was found about one target of one module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradcheck_dist.events import Site
from gradcheck_dist.verify.difference import Outcome
from gradcheck_dist.verify.targets import Target

Shape = Literal["", "scaled", "cut", "constant", "flat", "other", "partial", "stopped", "apart", "reversed", "redrawn"]
ARRIVED = "the gradients that arrive at its output differ between ranks that hold the same output: look behind it"
ATTACHED = "of the losses that are attached inside, whose gradient a function puts into backward"
BENT = "what it gives in backward is no multiple of what arrives: it clips or scales by the gradient itself"
DIFFERENTIATES = (
    "its forward differentiates (torch.autograd.grad) and cuts gradients off (detach, no_grad): whether what "
    "reaches it is what these leave over cannot be told"
)
LOSS = "of the loss that it gives"
KINK = "its forward has a kink exactly here: nothing there is the derivative"
INSIDE = "a module inside is wrong: mend it and verify again"


@dataclass(frozen=True)
class Skipped:
    """What was not checked: `what` is "module", "calls", "parameter" or "forward"; `name` says which."""

    path: str
    what: str
    name: str
    reason: str


@dataclass(frozen=True)
class FunctionAt:
    """A torch.autograd.Function whose backward alone is not the derivative of its forward: `shape` and `factor` as of a
    Result. `hands_on`: its forward gives its input as it is."""

    name: str
    defined_at: Site | None
    called_at: Site | None
    hands_on: bool
    shape: Shape
    factor: float | None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for what is one fault: several functions may stand on one line."""
        return self.name, self.called_at, self.shape, f"{self.factor:.4g}" if self.factor is not None else ""


@dataclass(frozen=True)
class Result:
    """What was found about one target. `observed` is autograd's derivative along a direction, `numerical` the
    differences', both in the unit of the function; `factor` is observed / numerical where that is one number.

    `shape`: "scaled" by one factor, "cut" (no gradient although the output depends on it), "constant" (the same
    gradient whatever arrives), "flat" (a gradient although the output does not depend on it), "other"; "stopped": right
    where what `reason` names is constant; "apart": the derivative of each rank's own share, not of the sum over ranks;
    "redrawn": what draws random numbers is run again in backward from another state; "reversed": right but for
    functions that turn the sign; "partial": right as a summand of the sum over `ranks`;
    `left_unsummed`: an input's gradient that is one although all ranks hold the same outputs and the same gradients of
    them. Right where the caller sums. `seen`: fingerprints of that input, or of the outputs where ARRIVED is the
    reason. `site`: where it happens, where that is known better than by the module. `call` of `num_calls`:
    which call of the module. `kinked`: the function has a kink at the point. `functions`: those inside that are wrong;
    `at_their_word`: right if they are taken at it.
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
    site: Site | None = None
    call: int = 0
    num_calls: int = 1
    kinked: bool = False
    functions: tuple[FunctionAt, ...] = ()
    at_their_word: bool = False

    @property
    def stopped(self) -> bool:
        """Whether a stop-gradient that is written makes the difference."""
        return self.outcome == "wrong" and (self.shape == "stopped" or (self.shape == "cut" and bool(self.reason)))

    @property
    def explained(self) -> bool:
        """Whether what makes the difference is known by its line, so that what is around it can be looked at."""
        return self.stopped or (self.outcome == "wrong" and self.at_their_word)
