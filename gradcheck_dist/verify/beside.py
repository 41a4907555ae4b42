"""A kink exactly at the point: ReLU of a masked position, of a layer that begins at zero, the larger of two equals.

Central differences take the mean of both sides there, autograd the one that somebody chose, and both are right. So what
is wrong at a kink is looked at once more beside it, where nothing is exactly zero or equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gradcheck_dist.verify.difference import BESIDE
from gradcheck_dist.verify.function import Function
from gradcheck_dist.verify.result import KINK, Result
from gradcheck_dist.verify.targets import Target

if TYPE_CHECKING:
    from gradcheck_dist.verify.measure import Measured


def looked_beside(measured: Measured, target: Target, wrong: Result) -> Result:
    """A result that is wrong at a kink: right or wrong as it is beside it, else undetermined. All ranks of the module's
    exchange come here."""
    function = measured.function
    left_open = replace(wrong, outcome="undetermined", shape="", factor=None, reason=KINK)
    if not isinstance(function, Function):
        return left_open  # what was taken down, or attached, has the gradient of its own point alone
    here = {key: function.variables[key] for key in target.keys}
    center = measured.center
    try:
        for key, value in here.items():
            function.variables[key] = value + BESIDE * measured.direction(key, "beside")
        gradient, added = (function.differentiated(scale)[1] for scale in (1.0, 0.0))
        measured.center = function.value({})
        outcome, kinked = measured.outcome(target, "beside", {key: (gradient[key], added[key]) for key in gradient})
    finally:
        function.variables.update(here)
        measured.center = center
    if outcome == "right":
        return replace(left_open, outcome="right", reason="")
    return wrong if outcome == "wrong" and not kinked else left_open
