"""What lines of a clip by hand are taken to divide by besides, and the steps that show it.

Behind a clip that acts the whole gradient has the clip's norm, whatever its lines divide by: nothing of one step tells
a division from a forgotten one. A step in which the same lines do not clip tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.causes.account import account
from gradcheck_dist.diagnosis.causes.culprit import Culprit, culprit_of_gap
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.ledger.tracks import StepData

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

Place = tuple[object, ...]
"""Equal for the same line in other steps."""
ALIKE = 1e-2


@dataclass(frozen=True)
class Assumed:
    """The lines behind `place` are taken to divide by `divisor` besides; `where` and `number` in words. `measured`:
    that is what the weights were too large by where the norm was taken."""

    divisor: float
    place: Place
    where: str
    number: str
    measured: bool = False

    @property
    def reason(self) -> str:
        until = "where their norm is taken" if self.measured else "before it"
        return (
            f"gradients are clipped by hand{self.where}, and the weights {until} are x {self.number} unless the same "
            "lines divide by this number too. A clip that acts leaves its norm whatever it divides by, so a forgotten "
            "division would look the same. A step whose gradients are shorter than the clip's norm tells: record one, "
            "or clip at a larger norm"
        )


def place_of(culprit: Culprit) -> Place:
    return culprit.start


def divisions(data: StepData, held: Sequence[Held], quantities: Mapping[str, float]) -> dict[Place, frozenset[str]]:
    """What lines that nobody recorded divided weights by that came out right: all names of the number."""
    for one in held:
        for cell in one.cells:
            found = account(data, one, cell)
            if cell.right and found.gaps:
                return {
                    place_of(culprit_of_gap(gap, found)): names_of(1 / gap.factor, quantities)
                    for gap in found.gaps
                    if gap.factor > 0
                }
    return {}


def names_of(number: float, quantities: Mapping[str, float]) -> frozenset[str]:
    """What a number may be called, and itself: tokens are others in each step."""
    names = name_number(number, quantities, ALIKE)
    return frozenset([f"{number:.3g}", *(name.expression for name in names)])


def confirm(verdicts: Sequence[StepVerdict]) -> None:
    """Leave steps open of which no other step shows that their clip's lines divide as is assumed."""
    for verdict in verdicts:
        assumed = verdict.assumed
        if assumed is None:
            continue
        mine = names_of(assumed.divisor, verdict.context.quantities)
        if not any(mine & other.divided.get(assumed.place, frozenset()) for other in verdicts):
            verdict.reasons.append(assumed.reason)
