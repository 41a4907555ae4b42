"""A clip by hand of all gradients, where a line behind it scaled some of them once more.

What most gradients share is the clip's coefficient. Some have another factor: one parameter that is halved, a group
with a factor of its own. Had nothing else befallen these, the whole would have the clip's norm, a number that somebody
wrote; so the norm is taken as it would be without what sets them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import msgspec

from gradcheck_dist.diagnosis.causes.account import account
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.culprit import culprit_of_gap
from gradcheck_dist.diagnosis.norms.step_norms import Part, StepNorms
from gradcheck_dist.diagnosis.weights.cells import GONE, Cell, Held
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.events import Clip, OptimizerStep
from gradcheck_dist.ledger.tracks import ParamKey, StepData


def as_if_all_alike(
    case: Case, cases: Sequence[Case], judged: Sequence[Held], data: StepData, norms: StepNorms
) -> tuple[Case, StepNorms] | None:
    """A case of the gradients that share a factor with most others, whichever case of the step they are in, and the
    norms as they would be if all had it; None where the case is no such, or nothing sets others apart."""
    ends = OptimizerStep | Clip
    if not case.culprit.absent and not (case.culprit.unrecorded and isinstance(case.culprit.before, ends)):
        return None
    known = {id(held): (held, *_factor(held)) for held in judged if held.cells and not held.is_gone}
    values = [factor for _, factor, _ in known.values() if factor is not None]
    if not values or any(factor is None or factor <= 0 for _, factor, _ in known.values()):
        return None
    common = median(values)
    alike = [held for held, factor, margin in known.values() if factor is not None and abs(factor - common) <= margin]
    mine = {id(held) for other in cases for held in other.held}
    in_part = any(_is_gone(cell) for held, _, _ in known.values() for cell in held.cells)
    if not len(known) / 2 < len(alike) < len(known) + in_part or not all(id(held) in mine for held in alike):
        return None
    members = {id(held) for held in alike}
    there = [(held, cell) for held in alike for cell in held.cells if not _is_gone(cell)]
    best, cell = min(there, key=lambda one: one[1].margin)
    accounted = account(data, best, cell)
    before = case.culprit.before
    gaps = [gap for gap in accounted.gaps if (gap.end is before if before is not None else isinstance(gap.end, ends))]
    if not gaps and before is None:
        return None
    culprit = case.culprit if before is not None else culprit_of_gap(gaps[-1], accounted)
    pattern = Pattern("uniform", "", cell.ratio, tolerance=cell.margin / abs(cell.ratio))
    apart: dict[tuple[int, ParamKey], float] = {}
    for held, factor, _ in known.values():
        if id(held) not in members and factor:
            apart |= {(rank, held.param): factor / cell.ratio for rank in held.ranks}
    return (
        replace(
            case,
            culprit=replace(culprit, factor=gaps[-1].factor if gaps else cell.ratio, write=None),
            held=alike,
            cells=there,
            patterns=[pattern],
            everywhere=True,
        ),
        replace(norms, parts={at: _without(part, apart.get(at, 1.0)) for at, part in norms.parts.items()}),
    )


def _without(part: Part, factor: float) -> Part:
    return part if factor == 1.0 else msgspec.structs.replace(part, norm=part.norm / factor)


def _factor(held: Held) -> tuple[float | None, float]:
    """The one factor of all contributions that are in a gradient, None where they have several; and how far it may be
    off."""
    there = [cell for cell in held.cells if not _is_gone(cell)]
    best = min(there, key=lambda cell: cell.margin)
    alike = all(abs(cell.ratio - best.ratio) <= cell.margin + best.margin for cell in there)
    return (best.ratio if alike else None), 2 * best.margin


def _is_gone(cell: Cell) -> bool:
    return abs(cell.ratio) <= GONE
