"""Weights that were left out of what a line of the trainer's did to others: an unscaling or a division that forgot some
parameters. The loss is not to blame for them, since the others carry the same one and came out right."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, prod

from gradcheck_dist.diagnosis.causes.account import SAME, Gap
from gradcheck_dist.diagnosis.causes.culprit import Culprit, kind_of, line_of
from gradcheck_dist.diagnosis.causes.hands import Judged, still_wrong


def give_spared(wrong: Sequence[Judged], every: Sequence[Judged]) -> None:
    """Give wrong weights to the lines between which nothing was done to them, and what they lack was done to right ones
    of the same contribution on the same rank."""
    helped: dict[tuple[object, ...], list[Judged]] = {}
    for one in every:
        if one.cell.right and len(one.account.gaps) and abs(_unseen(one) - 1) > one.tolerance + SAME:
            helped.setdefault(_place(one), []).append(one)
    for one in wrong if helped else ():
        if one.shares or not still_wrong(one) or abs(_unseen(one) - 1) > one.tolerance:
            continue
        for other in helped.get(_place(one), ()):
            gap = max(other.account.gaps, key=lambda gap: abs(log(abs(gap.factor) or 1e-30)))
            # Experts are reduced on a line of their own; the lines that scale others may follow either one.
            ends = [mine for mine in one.account.gaps if _lines(mine)[1] == _lines(gap)[1]]
            own = next((mine for mine in ends if _lines(mine) == _lines(gap)), ends[-1] if ends else None)
            lacks = abs(one.documented * _unseen(other) - 1) <= one.tolerance + other.tolerance
            if lacks and own is not None and own.start is not None:
                one.shares.append((_culprit(own, one.cell.ratio, gap.factor), one.cell.ratio))
                break


def _culprit(gap: Gap, ratio: float, spared: float) -> Culprit:
    assert gap.start is not None
    return Culprit(
        kind_of(gap.start), gap.rank, gap.start, factor=ratio, unrecorded=True, before=gap.end, spared=spared
    )


def _unseen(one: Judged) -> float:
    """What nobody recorded did to a weight."""
    return prod(gap.factor for gap in one.account.gaps)


def _place(one: Judged) -> tuple[object, ...]:
    return (one.cell.key, one.held.rank, one.held.param[0])


def _lines(gap: Gap) -> tuple[object, ...]:
    return tuple(event and (kind_of(event), line_of(event)) for event in (gap.start, gap.end))
