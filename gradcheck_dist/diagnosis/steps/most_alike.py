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
from gradcheck_dist.diagnosis.norms.step_norms import Part, StepNorms
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.events import Clip, OptimizerStep
from gradcheck_dist.ledger.tracks import ParamKey, StepData


def as_if_all_alike(
    case: Case, judged: Sequence[Held], data: StepData, norms: StepNorms
) -> tuple[Case, StepNorms] | None:
    """The case of the gradients that share a factor with most others, and the norms as they would be if all had it;
    None where the case is no such, or nothing sets others apart."""
    if not case.culprit.unrecorded or not isinstance(case.culprit.before, OptimizerStep | Clip):
        return None
    known = {id(held): (held, *_factor(held)) for held in judged if held.cells and not held.is_gone}
    values = [factor for _, factor, _ in known.values() if factor is not None]
    if not values or any(factor is None or factor <= 0 for _, factor, _ in known.values()):
        return None
    common = median(values)
    alike = [held for held, factor, margin in known.values() if factor is not None and abs(factor - common) <= margin]
    mine = {id(held) for held in case.held}
    if not len(known) / 2 < len(alike) < len(known) or not all(id(held) in mine for held in alike):
        return None
    members = {id(held) for held in alike}
    best = min(alike, key=lambda held: min(cell.margin for cell in held.cells))
    cell = min(best.cells, key=lambda cell: cell.margin)
    own = [gap.factor for gap in account(data, best, cell).gaps if gap.end is case.culprit.before]
    pattern = Pattern("uniform", "", cell.ratio, tolerance=cell.margin / abs(cell.ratio))
    apart: dict[tuple[int, ParamKey], float] = {}
    for held, factor, _ in known.values():
        if id(held) not in members and factor:
            apart |= {(rank, held.param): factor / cell.ratio for rank in held.ranks}
    return (
        replace(
            case,
            culprit=replace(case.culprit, factor=own[-1] if own else cell.ratio, write=None),
            held=alike,
            cells=[(held, one) for held, one in case.cells if id(held) in members],
            patterns=[pattern],
            everywhere=True,
        ),
        replace(norms, parts={at: _without(part, apart.get(at, 1.0)) for at, part in norms.parts.items()}),
    )


def _without(part: Part, factor: float) -> Part:
    return part if factor == 1.0 else msgspec.structs.replace(part, norm=part.norm / factor)


def _factor(held: Held) -> tuple[float | None, float]:
    """The one factor of all contributions in a gradient, None where they have several; and how far it may be off."""
    best = min(held.cells, key=lambda cell: cell.margin)
    alike = all(abs(cell.ratio - best.ratio) <= cell.margin + best.margin for cell in held.cells)
    return (best.ratio if alike else None), 2 * best.margin
