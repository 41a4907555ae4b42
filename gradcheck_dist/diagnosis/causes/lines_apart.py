"""An unrecorded change of which lines of the program's own did a part to some gradients, and the rest befell all.

Between two measurements any number of lines may stand. Those that are seen to multiply by a number that somebody wrote
are causes of their own, each with its parameters, where what is left then is one factor for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

from gradcheck_dist.diagnosis.causes.blame import Blame, with_share
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.own_lines import between, params_on
from gradcheck_dist.diagnosis.causes.places import kind_of, line_of
from gradcheck_dist.diagnosis.causes.routes import SAME
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.written import number_of_line
from gradcheck_dist.events import Backward, GradWrite, OptimizerStep, Reduce
from gradcheck_dist.ledger.contributions import ContributionKey
from gradcheck_dist.ledger.tracks import StepData

Line = tuple[str, int]
MOST_LINES = 6
"""More lines that multiply by numbers leave too many ways to set gradients apart."""


def lines_apart(data: StepData, blamed: Blame) -> list[Blame]:
    """What befell all gradients of a change, and what each line did to some of them besides; the change as it is where
    lines do not tell it apart so.

    Of gradients that lines left as they were and others most have to be of the former, or none: else a line may be
    meant, and be lacking in the others.
    """
    culprit = blamed.culprit
    if not culprit.unrecorded or culprit.in_flight or culprit.unheard or culprit.spared is not None:
        return [blamed]
    numbers = _numbers(data, culprit, blamed.held)
    of_any = {line for of_held in numbers.values() for line in of_held}
    lines = sorted(line for line in of_any if not all(line in of_held for of_held in numbers.values()))
    if not lines or len(lines) > MOST_LINES:
        return [blamed]
    for size in range(1, len(lines) + 1):
        for chosen in combinations(lines, size):
            if (parts := _parted(data, blamed, numbers, chosen)) is not None:
                return parts
    return [blamed]


def by_a_line(data: StepData, blamed: Blame, judged: Sequence[Held]) -> Blame:
    """The same, laid to a line of the program's own where a reduction seems to have the wrong constant: of what is off,
    and of nothing that is right, one line behind it is seen to multiply all by just the number that it is off by. What
    the program divides by in between made up for it, and shows as nothing. So is what a line multiplies by that is
    right for fewer parameters, which other reductions or none bring, than it is wrong for: it was meant for these."""
    culprit, ratios = blamed.culprit, [cell.ratio for _, cell in blamed.cells]
    event = culprit.event
    if not isinstance(event, Reduce) or culprit.unrecorded or culprit.absent or not blamed.cells:
        return blamed
    rank, off = culprit.rank, ratios[0]
    last = max((one.seq for one in data.events[rank] if isinstance(one, OptimizerStep)), default=None)
    before = data.event_of[rank].get(last) if last is not None else None
    if before is None or any(abs(ratio - off) > SAME * abs(off) for ratio in ratios):
        return blamed
    mine = params_on(data, [held for held in blamed.held if held.rank == rank], rank)
    right = [held for held in judged if held.rank == rank and any(cell.right for cell in held.cells)]
    others = params_on(data, right, rank)
    unseen = replace(culprit, unrecorded=True, before=before, wrong_constant=False, nominal=1.0, factor=off)
    lines: dict[Line, set[int]] = {}
    for one in between(data, unseen, rank):
        line, number = line_of(one), number_of_line(one)
        if line is None or number is None or not isinstance(one, GradWrite):
            continue
        if abs(number - off) <= SAME * abs(off):
            lines.setdefault(line, set()).update(data.params_of(rank, one.params))
    all_of_it = culprit.wrong_constant
    alike = [one for one in data.events[rank] if isinstance(one, Reduce) and _is_like(one, event)]
    reduced = {param for one in alike for param in data.params_of(rank, one.params)}
    such = [
        params
        for params in lines.values()
        if mine and mine <= params
        if (all_of_it if params.isdisjoint(others) else _is_for_few(mine, params & others, reduced))
    ]
    return Blame(unseen, blamed.cells, blamed.repeats) if len(such) == 1 else blamed


def _is_for_few(wrong: set[int], right: set[int], reduced: set[int]) -> bool:
    """Whether a line is right for fewer parameters than it is wrong for, none of which the same reduction brings."""
    return len(right) < len(wrong) and right.isdisjoint(reduced)


def _is_like(one: Reduce, event: Reduce) -> bool:
    """Whether a reduction is like another: of the same kind, over the same ranks."""
    return (one.impl, one.op, one.group) == (event.impl, event.op, event.group)


def _parted(
    data: StepData, blamed: Blame, numbers: Mapping[int, Mapping[Line, float]], chosen: Sequence[Line]
) -> list[Blame] | None:
    """The parts of a change, if lines did what sets its gradients apart; None where they did not."""
    by = {held: prod(of_held.get(line, 1.0) for line in chosen) for held, of_held in numbers.items()}
    rest = [(held, with_share(cell, cell.ratio / by[id(held)])) for held, cell in blamed.cells]
    if not _alike(rest):
        return None
    touched = sum(not set(chosen).isdisjoint(of_held) for of_held in numbers.values())
    alone = all(abs(cell.ratio - 1) <= cell.margin + SAME for _, cell in rest)
    if 2 * touched > len(numbers) and not (alone and touched == len(numbers) and len(chosen) > 1):
        return None
    parts = [] if alone else [Blame(blamed.culprit, rest, blamed.repeats)]
    for line in chosen:
        places = [at for at, (held, _) in enumerate(blamed.cells) if line in numbers[id(held)]]
        mine = [blamed.cells[at] for at in places]
        cells = [(held, with_share(cell, numbers[id(held)][line])) for held, cell in mine]
        culprit = _narrowed(data, blamed.culprit, mine[0][0], line, cells[0][1].ratio)
        parts.append(Blame(culprit, cells, [blamed.repeats[at] for at in places]))
    return parts


def _narrowed(data: StepData, culprit: Culprit, held: Held, line: Line, number: float) -> Culprit:
    """The change from the last pass or reduction in front of a line on: of the losses before that it is none."""
    write = next(one for one in between(data, culprit, held.rank) if line_of(one) == line)
    events = data.events[held.rank]
    earlier = [one for one in events if isinstance(one, Backward | Reduce) and one.seq < write.seq]
    start = max(earlier, key=lambda one: one.seq, default=None)
    if start is None:
        return culprit
    kind = kind_of(start)
    return replace(culprit, kind=kind, rank=held.rank, event=start, gradient=None, factor=number, nominal=1.0)


def _numbers(data: StepData, culprit: Culprit, held: Sequence[Held]) -> Mapping[int, dict[Line, float]]:
    """By gradient and line what it was multiplied by; nothing where a line has no number that somebody wrote, or what
    runs in between is not known on a rank."""
    if culprit.event is None or culprit.before is None:
        return {}
    found: dict[int, dict[Line, float]] = {}
    for one in held:
        lines: dict[Line, float] = {}
        ids = params_on(data, [one], one.rank)
        for event in between(data, culprit, one.rank):
            line, number = line_of(event), number_of_line(event)
            if line is None or number is None or not isinstance(event, GradWrite):
                continue  # a division by tokens, a clip: no cause of its own
            if not ids.isdisjoint(data.params_of(one.rank, event.params)):
                lines[line] = lines.get(line, 1.0) * number
        found[id(one)] = {line: number for line, number in lines.items() if number != 1}
    return found


def _alike(rest: Sequence[tuple[Held, Cell]]) -> bool:
    """Whether what is left of each contribution's weights is one number."""
    first: dict[ContributionKey, Cell] = {}
    for _, cell in rest:
        known = first.setdefault(cell.key, cell)
        if abs(cell.ratio - known.ratio) > cell.margin + known.margin + SAME * abs(known.ratio):
            return False
    return True
