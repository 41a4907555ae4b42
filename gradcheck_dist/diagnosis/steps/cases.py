"""The cases of a step: what its losses did wrong, and what happened to the gradients afterwards, by culprit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median

from gradcheck_dist.diagnosis.causes.alone import without_divisions_alone
from gradcheck_dist.diagnosis.causes.beside import reduced_beside, scaled_beside
from gradcheck_dist.diagnosis.causes.blame import Blame, accounted, blame
from gradcheck_dist.diagnosis.causes.case import Case, common_factor, is_common_factor, join_alike, name_case
from gradcheck_dist.diagnosis.causes.culprit import Culprit, blame_loss, order
from gradcheck_dist.diagnosis.causes.lines_apart import by_a_line, lines_apart
from gradcheck_dist.diagnosis.causes.own_lines import (
    behind_bare_sum,
    line_between,
    line_that_differs,
    lines_within,
    rank_of,
)
from gradcheck_dist.diagnosis.causes.reweighed import off_alike
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.causes.skipped import without_skipped
from gradcheck_dist.diagnosis.causes.summed_means import summing
from gradcheck_dist.diagnosis.causes.token_lines import token_line
from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.own_objective import own_division, own_objective
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.weights.cells import Cell, Held, average, judge, loss_rounding, pool
from gradcheck_dist.diagnosis.weights.patterns import Pattern, Sample, explain
from gradcheck_dist.diagnosis.weights.quiet import losses_show
from gradcheck_dist.events import Backward, Event, GradientNorm, GradWrite, Reduce, Site
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import ParamKey, StepData

EXACT = 1e-6
"""Tolerance of ratios that token counts alone determine."""


def cases_of(
    verdict: StepVerdict,
    measured: list[Held],
    target: Aim,
) -> list[Case]:
    """What the losses did wrong, and what happened to the gradients afterwards.

    Whatever follows a loss treats all tokens of a contribution alike. So weights that are off between contributions
    from the very start are the losses' doing; the rest is judged against what these losses were out for.
    """
    expected = target.expected
    held_alone = any(not cell.right for held in verdict.held for cell in held.cells)
    together = pool(verdict.held)
    quiet = not held_alone and all(cell.right for held in together for cell in held.cells)
    matrix = verdict.held if held_alone else together
    wrong = {cell.key for held in matrix for cell in held.cells if not cell.right}
    right = ({cell.key for held in matrix for cell in held.cells} - wrong) or _mostly_right(matrix)
    found = own_objective(verdict.contributions, target, right)
    if found is not None and held_alone:
        line = token_line(accounted(verdict.data, verdict.contributions, matrix), verdict.contributions)
        found = found if line is None else own_objective(verdict.contributions, target, right, line.tokens)
    own = found.weights if found is not None else None
    rounded = loss_rounding(verdict.contributions) / 2  # two are put apart by both
    if quiet and not losses_show(together, own, expected, rounded):
        return []
    if found is None or own is None:
        return _cases(verdict, matrix)
    if held_alone and off_alike(matrix):
        undone = _cases(verdict, matrix)
        if undone and all(case.culprit.kind != "loss" for case in undone):
            return undone
    divided_again = own_division(matrix, verdict.contributions, expected)
    rest: list[Case] = []
    judged: list[Held] = []
    if divided_again is not None:
        own = divided_again
    else:
        judged = judge(measured, verdict.contributions, own)
        if found.num_parts > 1:
            alone = judge(measured, verdict.contributions, found.apart)
            if _num_right(alone) > _num_right(judged):
                own, judged = found.apart, alone
        rest = _cases(verdict, judged if held_alone else pool(judged))
    everyone = {held.param for held in matrix if held.cells}
    everywhere = [
        case for case in rest if case.everywhere or (len(rest) == 1 and {held.param for held in case.held} == everyone)
    ]
    common = [case for case in everywhere if is_common_factor(case) or _may_be_the_loss(case)]
    if not found.anchored and all(case.pattern.kind == "uniform" for case in everywhere):
        common = [case for case in everywhere if not _follows_norm(case.culprit)]
        if not common and (scale := _as_losses(verdict, judged)) is not None:
            own = {key: weight * Fraction(scale) for key, weight in own.items()}
            judged = judge(measured, verdict.contributions, own)
            rest = _cases(verdict, judged if held_alone else pool(judged))
    elif len(common) > 1:
        common = []
    # What all losses share is one doing of theirs with what they do not share. Where their scale is not known, what all
    # weights share is a part of it, of whichever factors that seems to be made.
    for case in common:
        own = {key: weight * Fraction(common_factor(case)) for key, weight in own.items()}
    rest = [case for case in rest if not any(case is one for one in common)]
    loudest = max(own, key=lambda key: abs(float(own[key] / expected[key]) - 1))
    culprit = blame_loss(verdict.contributions.by_key[loudest], float(own[loudest] / expected[loudest]))
    exact = max(EXACT, rounded)
    cells = [
        (held, replace(cell, ratio=float(own[cell.key] / expected[cell.key]), tolerance=exact, stderr=0.0))
        for held in verdict.held
        for cell in held.cells
    ]
    return [_case(verdict, Blame(culprit, cells, [0] * len(cells)), verdict.held), *rest]


def _mostly_right(matrix: Sequence[Held]) -> set[ContributionKey]:
    """The contributions that came out right in most gradients, where none did in all: their losses have the scale that
    was meant, whatever was done to a few gradients besides."""
    counts: dict[ContributionKey, int] = defaultdict(int)
    for cell in (cell for held in matrix for cell in held.cells):
        counts[cell.key] += 1 if cell.right else -1
    return {key for key, count in counts.items() if count > 0}


def _as_losses(verdict: StepVerdict, judged: list[Held]) -> float | None:
    """The factor by which most gradients are off, all alike, and the losses that they come from as well: that is the
    losses' scale, where nothing else tells it. None where there is none."""
    alike: dict[tuple[ParamKey, int], list[float]] = defaultdict(list)
    changed: set[tuple[ParamKey, int]] = set()
    for one in accounted(verdict.data, verdict.contributions, judged):
        alike[one.held.param, one.held.rank].append(one.cell.ratio)
        if abs(one.cell.ratio - one.account.root) > one.cell.margin + one.allowed:
            changed.add((one.held.param, one.held.rank))
    as_losses = [ratios for held, ratios in alike.items() if held not in changed]
    ratios = sorted(ratio for of in as_losses for ratio in of)
    if 2 * len(as_losses) <= len(alike) or ratios[0] <= 0 or ratios[-1] > ratios[0] * (1 + SAME):
        return None
    return median(ratios) if abs(ratios[0] - 1) > SAME else None


def _may_be_the_loss(case: Case) -> bool:
    """Whether lines behind the losses have a wrong number, or these, which are wrong anyway: fewer causes do."""
    culprit = case.culprit
    return culprit.kind == "loss" and culprit.gradient is not None and common_factor(case) > 0


def _follows_norm(culprit: Culprit) -> bool:
    """Whether a change begins where the norm of gradients was taken: it is a clip's, whatever the losses weigh."""
    return culprit.unrecorded and isinstance(culprit.event, GradientNorm)


def _num_right(judged: list[Held]) -> int:
    return sum(cell.right for held in judged for cell in held.cells)


def _cases(verdict: StepVerdict, judged: list[Held]) -> list[Case]:
    """The wrong cells by culprit, each group with its shape and names."""
    quantities = verdict.context.quantities
    found = blame(verdict.data, verdict.contributions, judged, quantities, relative=verdict.context.relative)
    found = [one for one in found if not all(cell.right for _, cell in one.cells)] or found  # made up for by itself
    found = _of_one_fault(found, judged, verdict.contributions, of_tasks=verdict.context.of_tasks)
    found = [by_a_line(verdict.data, one, judged) for one in found]
    parts = (part for one in found for blamed in _without_emptied(one) for part in lines_apart(verdict.data, blamed))
    cases = [_case(verdict, part, judged) for part in parts]
    join_alike(cases, sum(bool(held.cells) for held in verdict.held))
    return without_skipped(without_divisions_alone(cases), judged)


def _without_emptied(blamed: Blame) -> list[Blame]:
    """What lines of the trainer's did to some parameters, and others of which they left nothing on any rank: that is
    no factor, and done by other lines."""
    left = {held.param for held in blamed.held if not held.is_gone}
    if not blamed.culprit.unrecorded or not left or all(held.param in left for held in blamed.held):
        return [blamed]
    parts: list[Blame] = []
    for there in (True, False):
        mine = [index for index, (held, _) in enumerate(blamed.cells) if (held.param in left) is there]
        factor = blamed.culprit.factor if there else 0.0
        culprit = replace(blamed.culprit, factor=factor)
        parts.append(Blame(culprit, [blamed.cells[at] for at in mine], [blamed.repeats[at] for at in mine]))
    return parts


def _of_one_fault(
    found: list[Blame], judged: list[Held], contributions: Contributions, *, of_tasks: bool
) -> list[Blame]:
    """What all losses lack alike is one cause, though each has a line of its own: those of one forward pass's tasks,
    and those of which one is in each pass (the branches of a condition, as of a loop that reduces in its last pass)."""
    losses = [one for one in found if one.culprit.kind == "loss" and not one.culprit.unrecorded]
    wrong = [pair for one in losses for pair in zip(one.cells, one.repeats, strict=True) if not pair[0][1].right]
    cells = [cell for (_, cell), _ in wrong]
    if len(losses) < 2 or any(abs(cell.ratio - cells[0].ratio) > cell.margin + cells[0].margin for cell in cells):
        return found
    all_are_wrong = len(cells) == sum(len(held.cells) for held in judged)
    one_each = all(c.num_losses == 1 for c in contributions.by_key.values())
    if not of_tasks and not (all_are_wrong and one_each):
        return found
    first = min((one.culprit for one in losses), key=order)
    joined = Blame(first, [cell for cell, _ in wrong], [times for _, times in wrong])
    return [joined, *(one for one in found if not any(one is loss for loss in losses))]


def _case(verdict: StepVerdict, blamed: Blame, judged: list[Held]) -> Case:
    case = Case(
        context=verdict.context,
        culprit=blamed.culprit,
        held=blamed.held,
        cells=blamed.cells,
        patterns=_explain(verdict, blamed),
        configured_at=configured_at(verdict.data, blamed.culprit),
        idle=_is_idle(verdict.data, blamed),
    )
    case.everywhere = case.concerns_all(judged)
    if case.culprit.absent and case.culprit.missing is None:
        case.culprit = replace(case.culprit, missing=_done_beside(verdict, case))
    pattern = case.pattern
    off, allowed = pattern.factor, 2 * pattern.tolerance
    case.culprit = behind_bare_sum(verdict.data, case.culprit, case.held, off, allowed, verdict.context.quantities)
    write = _line_that_differs(verdict.data, case, judged) if case.culprit.unrecorded else None
    if write is not None and case.culprit.spared is not None and _did_all(verdict.data, write, case):
        case.culprit = replace(case.culprit, spared=None, factor=write.factor)
    write = write or line_between(verdict.data, case.culprit, case.held, off, allowed)
    if write is not None:
        culprit = case.culprit
        alone = culprit.factor and write.factor and abs(write.factor / culprit.factor - 1) <= max(1e-3, allowed)
        if culprit.unrecorded and culprit.factor and culprit.nominal and not alone:  # what other lines do there
            culprit = replace(culprit, factor=culprit.factor / culprit.nominal, nominal=1.0)
        case.culprit = replace(culprit, write=write, rank=rank_of(verdict.data, write))
    else:
        case.culprit = replace(case.culprit, lines=lines_within(verdict.data, case.culprit, case.held))
    if case.culprit.kind == "loss" and (not case.culprit.unrecorded or case.culprit.gradient is not None):
        case.summing = summing(verdict.data, verdict.contributions, case.held)
    name_case(case)
    return case


def _is_idle(data: StepData, blamed: Blame) -> bool:
    """Whether a wrapper that holds all of these parameters reduced nothing in the step, on their ranks."""
    acted = {rank: {e.wrapper for e in events if isinstance(e, Reduce)} for rank, events in data.events.items()}
    return blamed.culprit.absent and all(
        any(
            held.param[1].startswith(f"{wrapper.name}.") and key not in acted.get(held.rank, ())
            for key, wrapper in data.wrappers.get(held.rank, {}).items()
        )
        for held in blamed.held
    )


def _done_beside(verdict: StepVerdict, case: Case) -> Event | None:
    """What other gradients went through, and these did not: a reduction that would bring what is gone, or a line."""
    data, place, pattern = verdict.data, verdict.contributions.coordinate, case.pattern
    if pattern.kind == "uniform" and pattern.factor:  # nothing is gone
        return scaled_beside(data, case.held, pattern.factor, max(SAME, 2 * pattern.tolerance))
    gone = {cell.key[0] for held, cell in case.cells if not cell.right and place.get(held.rank) != cell.key[0]}
    return reduced_beside(data, place, case.held, gone)


def _did_all(data: StepData, write: GradWrite, case: Case) -> bool:
    """Whether a line did to these gradients all that is wrong with them: they were not left as they were, though the
    number of another line and its own may come to that."""
    off = case.pattern.factor
    alike = write.factor is not None and abs(write.factor - off) <= max(1e-3, case.pattern.tolerance) * abs(off)
    return alike and case.pattern.kind == "uniform" and rank_of(data, write) in case.ranks


def _line_that_differs(data: StepData, case: Case, judged: list[Held]) -> GradWrite | None:
    """The line whose numbers differ between these weights, and from those of the right ones, as they do."""
    mine = {id(held) for held in case.held}
    others = (held for held in judged if id(held) not in mine and not held.is_gone)
    right = [(held, cell) for held in others for cell in held.cells if cell.right]
    return line_that_differs(data, case.culprit, [*case.cells, *right], 1e-3)


def _explain(verdict: StepVerdict, blamed: Blame) -> list[Pattern]:
    cells: dict[tuple[int, ContributionKey], list[tuple[Cell, int]]] = {}
    for (held, cell), times in zip(blamed.cells, blamed.repeats, strict=True):
        cells.setdefault((held.rank, cell.key), []).append((cell, times))
    samples = []
    largest = min(1.0, max((abs(cell.ratio) for _, cell in blamed.cells), default=1.0) or 1.0)
    for (rank, key), found in cells.items():
        together = average([cell for cell, _ in found])
        alike = all(abs(cell.ratio - together.ratio) <= cell.margin + together.margin for cell, _ in found)
        for cell, times in [(together, found[0][1])] if alike else found:
            holder = verdict.contributions.coordinate.get(rank, -1)
            margin = max(cell.margin, cell.material * abs(cell.ratio))  # what is off by no more makes no shape
            samples.append(Sample(key, rank, holder, cell.ratio, margin, times, largest))
    return explain(_without_again(samples, verdict.context.again) or samples, verdict.context)


def _without_again(samples: list[Sample], again: Mapping[ContributionKey, ContributionKey]) -> list[Sample]:
    """Without passes that differentiate a loss again and weigh what the first one does: they have no count to show a
    shape by."""
    told = {(one.holder, one.key): one for one in samples if one.key not in again}
    first = {(one.holder, one.key): told.get((one.holder, again[one.key])) for one in samples if one.key in again}
    alike = {
        (one.holder, one.key)
        for one in samples
        if (other := first.get((one.holder, one.key))) and abs(one.ratio - other.ratio) <= one.margin + other.margin
    }
    return [one for one in samples if (one.holder, one.key) not in alike]


def configured_at(data: StepData, culprit: Culprit) -> str | None:
    """The other line that matters, "file:line": where the wrapper was made that reduced, or where none followed that of
    the whole model, where a loss went backward."""
    event, wrappers = culprit.event, data.wrappers.get(culprit.rank, {})
    if culprit.gradient is not None and culprit.gradient.site is not None:
        return _users_line(culprit.gradient.site)
    if culprit.absent and isinstance(event, Backward):
        wrapper = max(wrappers.values(), key=lambda one: len({*one.group, *one.replicate_group}), default=None)
    elif isinstance(event, Reduce) and event.wrapper is not None:
        wrapper = wrappers.get(event.wrapper)
    else:
        return None
    return _users_line(wrapper.site) if wrapper is not None and wrapper.site else None


def _users_line(site: Site) -> str:
    return site.called_from or f"{site.file}:{site.line}"
