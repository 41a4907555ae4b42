"""Copies of one gradient that ranks scale apart: whatever was meant by it, what they hold drifts apart."""

from __future__ import annotations

from collections import defaultdict

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.cells import Cell
from gradcheck_dist.diagnosis.weights.written import Measured, distinct
from gradcheck_dist.events import Clip, GradientNorm, OptimizerStep
from gradcheck_dist.ledger.tracks import Track, got_the_same

_ENDS = OptimizerStep | Clip | GradientNorm
"""Behind these nothing makes copies alike again: a norm is taken of what is complete."""


def factor_of(cell: Cell) -> Measured:
    """(factor, relative tolerance); of a weight that is right within its tolerance exactly 1."""
    if cell.right:
        return 1.0, cell.margin
    return cell.ratio, cell.margin / max(abs(cell.ratio), 1e-12)


def replicas_part(case: Case) -> bool:
    """Whether copies of one gradient were scaled apart on different ranks behind the last reduction."""
    if not isinstance(case.culprit.before, _ENDS) or case.culprit.kind != "reduce":
        return False
    found: dict[object, list[Measured]] = defaultdict(list)
    for held, cell in case.cells:
        found[held.param, cell.key].append(factor_of(cell))
    return any(len(distinct(factors)) > 1 for factors in found.values())


def copies_part(case: Case, verdict: StepVerdict) -> bool:
    """Whether ranks that evaluate the same tokens (tensor parallel), and whose own passes gave them one gradient, hold
    it scaled apart in the end."""
    if not isinstance(case.culprit.before, _ENDS):
        return False
    params, place = {held.param for held in case.held}, verdict.contributions.coordinate
    found: dict[object, list[tuple[Track, Measured]]] = defaultdict(list)
    for held in verdict.held:
        for cell in held.cells if held.param in params else ():
            at = (held.param, cell.key, place.get(held.rank))
            found[at].append((verdict.data.tracks[held.param][held.rank], factor_of(cell)))
    return any(
        len(distinct([factor for _, factor in copies])) > 1
        and all(got_the_same(copies[0][0], other) for other, _ in copies[1:])
        for copies in found.values()
    )
