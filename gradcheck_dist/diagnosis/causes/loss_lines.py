"""Which line of the program multiplies a loss by just the number that is wrong.

A loss's weight tells that it was multiplied, and the reduction behind it may be what makes that one too many. The
source of the line tells more: `loss / world_size` on all ranks, or `loss * 2` on one alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import reduce
from operator import and_

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.vocabulary import RANKS, SCHEDULE
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.named_counts import names_passes, names_ranks, numbers_of
from gradcheck_dist.events import LossNumber, Site
from gradcheck_dist.ledger.combined_losses import unseen
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey

LossLine = tuple[Site, str]
"""Where a loss is multiplied, and what is written there."""
ROUNDED = 1e-5


def loss_lines(case: Case, judged: Sequence[Held]) -> list[LossLine]:
    """Lines of the program that multiply every loss whose weights are wrong by the very factor that these are off by,
    and none of the others; the outermost first, the user's own before a library's. What multiplies a loss is in all of
    its gradients, so a loss that weighs right in some of what was `judged` is multiplied rightly."""
    by_key = case.context.contributions.by_key
    wrong = {cell.key: cell for _, cell in case.cells if not cell.right}
    if case.terms or not wrong or any(key not in by_key for key in wrong):
        return []
    if any(cell.right and cell.expected and cell.key in wrong for held in judged for cell in held.cells):
        return []
    usual = next(iter(wrong.values()))
    if not all(abs(cell.ratio - usual.ratio) <= max(cell.margin, usual.margin) for cell in wrong.values()):
        return []
    of_pass = {key: _lines(case, one, usual) for key, one in by_key.items()}
    common = reduce(and_, (of_pass[key] for key in wrong))
    for key in _others(case, wrong):
        common -= of_pass[key]
    return sorted(common.elements(), key=lambda line: line[0].called_from is not None)


def in_words(lines: Sequence[LossLine]) -> str:
    """A sentence for an explanation; "" for no lines."""
    if not lines:
        return ""
    places = " and ".join(f"{site.short} ({written})" for site, written in lines)
    return f" The loss is multiplied by this number at {places}{', at each' if len(lines) > 1 else ''}."


def mended(case: Case, lines: Sequence[LossLine], fix: str) -> str:
    """What is to be done where such lines are known, beside `fix`, "" for nothing else."""
    if not lines:
        return fix
    own = [site for site, _ in lines if site.called_from is None] or [site for site, _ in lines]
    places = " or ".join(dict.fromkeys(site.short for site in own))
    some = _others(case, {cell.key for _, cell in case.cells if not cell.right})
    take_out = f"Take it out at {places}{', or let it multiply all losses of the step' if some else ''}."
    # Lines that write to gradients may do as much: one that does is told as the culprit.
    if (case.culprit.write is not None or case.culprit.lines) and fix:
        return f"{fix} Or: {take_out[0].lower()}{take_out[1:]}"
    return f"{take_out} Or: {fix[0].lower()}{fix[1:]}" if fix else take_out


def _others(case: Case, wrong: Collection[ContributionKey]) -> set[ContributionKey]:
    """The contributions that are not wrong. One without tokens weighs nothing, whatever multiplies it, and is none."""
    by_key = case.context.contributions.by_key
    return {key for key, one in by_key.items() if key not in wrong and one.num_tokens != 0}


def _lines(case: Case, contribution: Contribution, cell: Cell) -> Counter[LossLine]:
    near = max(cell.margin, ROUNDED * abs(cell.ratio))
    gradient, loss = contribution.gradient, contribution.loss
    if gradient is None or loss is None:
        return Counter()
    if any(abs(left - cell.ratio) <= near for left in unseen(gradient, loss)):
        return Counter()  # another line, which nobody saw, does it again
    found = [number for number in numbers_of(contribution) if abs(number.factor - cell.ratio) <= cell.margin]
    return Counter((number.site, number.written) for number in found if not _is_called_otherwise(case, number))


def _is_called_otherwise(case: Case, number: LossNumber) -> bool:
    """Whether the factor has the name of a number of ranks, and what is written there that of a number of passes, or
    the reverse: they happen to be equal. So may a number without a name be that of the passes, behind which a reduction
    is what is wrong."""
    powers = {name for name, _ in case.names[0].powers} if case.names else set()
    of_ranks, of_passes = names_ranks(number), names_passes(number)
    if powers & RANKS and not powers & SCHEDULE and of_passes and not of_ranks:
        return True
    if powers & SCHEDULE and not powers & RANKS and of_ranks and not of_passes:
        return True
    num_passes = len({key[1:] for key in case.context.contributions.by_key})
    as_many = abs(number.factor * num_passes - 1) <= ROUNDED
    return case.culprit.kind != "loss" and as_many and not of_ranks
