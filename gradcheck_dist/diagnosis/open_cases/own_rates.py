"""Parameters whose gradients hooks or lines multiply by constants: rates by layer, and gradients that are reversed."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.diagnosis.weights.written import SIMPLE, Measured, distinct, same
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.tracks import StepData

FEW = 8
"""How often something may act too often, as a whole number."""


def own_rates(case: Case, _: StepData) -> str | None:
    """Why constants inside of backward accuse nobody: others came out right, each such parameter has one number in all
    passes and on all ranks, and no degree or count makes it, nor a hand that acts twice. Nobody turns gradients
    round by mistake, whatever by."""
    culprit = case.culprit
    if culprit.kind != "backward" or culprit.unrecorded or culprit.absent or case.everywhere:
        return None
    known = [number for number, _ in _numbers(case)]
    if not known or any(_is_counted(number, case) for number in known):
        return None
    shown = f"x {known[0]:.4g}" + (f" to x {known[-1]:.4g}" if known[-1] - known[0] > 1e-3 * abs(known[-1]) else "")
    return (
        f"inside of backward the gradients of {in_short(sorted({held.param[1] for held in case.held}))} are multiplied "
        f"({shown}), by one number each in all passes and on all ranks, and others by none: hooks (register_hook) that "
        "give layers rates of their own or reverse gradients do this, and no degree or count makes these numbers. If "
        "it is not meant, look for such a hook"
    )


def are_rates(case: Case, judged: Sequence[Held], *, makes_up: bool) -> bool:
    """Whether what the program's lines do behind right weights may give layers rates of their own: one number for each
    parameter, in all passes and on all ranks, of which there are several and one at least is made of no degree or
    count. Others are left as they were. `makes_up`: the weights were off before, as those of the others, and a line is
    seen to multiply by what they are off by now."""
    concerned, on_each = {one.param for one in case.held}, {(one.param, one.rank) for one in case.held}
    left = any(one.param not in concerned for one in judged if one.cells)
    unlike, write = distinct(_numbers(case)), case.culprit.write
    if makes_up and not any(same(one, (write.factor, 0.0)) for one in unlike if write is not None and write.factor):
        return False
    if not left or all(_is_counted(number, case) for number, _ in unlike):
        return False
    if any(one.param in concerned and (one.param, one.rank) not in on_each for one in judged if one.cells):
        return False  # some ranks' copies alone
    return len(unlike) > 1  # one number may be anything that somebody forgot there


def _numbers(case: Case) -> list[Measured]:
    """The one number by which each parameter's weights are off, the smallest first; none where it is not one."""
    numbers = [_number([cell for held, cell in case.cells if held is one]) for one in case.held]
    known = [number for number in numbers if number is not None]
    return sorted(known) if len(known) == len(numbers) else []


def _number(cells: Sequence[Cell]) -> Measured | None:
    """The one number by which all weights of a parameter are off."""
    best = min(cells, key=lambda cell: cell.margin, default=None)
    if best is None or not best.ratio:
        return None
    alike = all(abs(cell.ratio - best.ratio) <= cell.margin + best.margin for cell in cells)
    return (best.ratio, best.margin / abs(best.ratio)) if alike else None


def _is_counted(number: float, case: Case) -> bool:
    """Whether degrees and counts may make up a number that somebody forgot or has twice."""
    tolerance = max(2 * case.pattern.tolerance, 1e-6)
    whole = max(number, 1 / number)
    if number > 0 and round(whole) <= FEW and abs(whole / round(whole) - 1) <= tolerance:
        return True  # twice, or a third: something that acts once too often
    return number > 0 and any(name.cost < SIMPLE for name in name_number(number, case.context.quantities, tolerance))
