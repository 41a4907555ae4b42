"""Weights that were left out of what a line of the trainer's did to others: an unscaling or a division that forgot some
parameters, or some ranks. The loss is not to blame for them, since the others carry the same one and came out right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, prod

from gradcheck_dist.diagnosis.causes.account import Gap
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.hands import NOISY, Judged, still_wrong
from gradcheck_dist.diagnosis.causes.places import kind_of, line_of
from gradcheck_dist.diagnosis.causes.routes import SAME


def give_spared(wrong: Sequence[Judged], every: Sequence[Judged], *, sure: bool = False) -> list[Judged]:
    """Give wrong weights to the lines between which nothing was done to them, and what they lack was done to right ones
    of the same contribution: to other parameters on the same rank, or to the same one on another rank.

    Args:
        sure: only weights that are known well.

    Returns:
        Those that are still to be explained.
    """
    helped: dict[tuple[object, ...], list[Judged]] = {}
    for one in every:
        if one.cell.right and len(one.account.gaps) and abs(_unseen(one) - 1) > one.tolerance + SAME:
            for place in _places(one):
                helped.setdefault(place, []).append(one)
    for one in wrong if helped else ():
        if one.shares or one.gone or not _unseen(one) or not still_wrong(one) or (sure and one.tolerance > NOISY):
            continue
        others = (other for place in _places(one) for other in helped.get(place, ()))
        if (found := next((pair for other in others if (pair := _lacks(one, other)) is not None), None)) is not None:
            own, gap = found
            one.shares.append((_culprit(own, one.cell.ratio, gap.factor), one.cell.ratio))
    _give_rest(wrong)
    _leave_to_losses(wrong, helped)
    return [one for one in wrong if not (one.shares and one.shares[0][0].spared is not None)]


def _give_rest(wrong: Sequence[Judged]) -> None:
    """Give what is off in one gradient by the same factor to the same lines: of an expert's gradients each rank may
    show its own contributions alone, and so nothing that those of other ranks could be compared with."""
    told = {id(one.held): one for one in wrong if one.shares and one.shares[0][0].spared is not None}
    for one in wrong:
        like = told.get(id(one.held))
        if one.shares or like is None or abs(one.cell.ratio - like.cell.ratio) > one.cell.margin + like.cell.margin:
            continue
        culprit = like.shares[0][0]
        if any(gap.start is culprit.event and gap.end is culprit.before for gap in one.account.gaps):
            one.shares.append((culprit, one.cell.ratio))


def _leave_to_losses(wrong: Sequence[Judged], helped: Mapping[tuple[object, ...], Sequence[Judged]]) -> None:
    """Take back what was given to lines, where others are off by the same on stages or ranks that these lines do not
    reach, and only few came right by them: one number before the losses explains all of it, and the lines' own number,
    which makes up for that in a few gradients, is not what the others lack."""
    told = [one for one in wrong if one.shares and one.shares[0][0].spared is not None]
    if not told:
        return
    rest = [one for one in wrong if not one.shares and not one.gone and _as_its_loss(one)]
    right = {(one.held.param, one.held.rank) for of_place in helped.values() for one in of_place}
    if len(right) >= len({(one.held.param, one.held.rank) for one in (*told, *rest)}):
        return
    for one in told:
        alike = (other for other in rest if other.cell.key == one.cell.key and _as_its_loss(one))
        if any(abs(one.cell.ratio - other.cell.ratio) <= one.cell.margin + other.cell.margin for other in alike):
            one.shares.clear()


def _as_its_loss(one: Judged) -> bool:
    """Whether all that happened to a weight is recorded, and says what it is off by."""
    untouched = abs(_unseen(one) - 1) <= one.tolerance + SAME
    return untouched and abs(one.documented - one.cell.ratio) <= one.cell.margin + SAME


def _lacks(one: Judged, other: Judged) -> tuple[Gap, Gap] | None:
    """The lines between which nothing was done to a weight, and what they did to another one, if that is what is
    missing."""
    tolerance = one.tolerance + other.tolerance
    lacking = _unseen(other) / _unseen(one)
    untouched = abs(_unseen(one) - 1) <= one.tolerance
    right = one.documented * _unseen(other) if untouched else one.cell.ratio * lacking
    if abs(right - 1) > tolerance:
        return None
    such = [max(other.account.gaps, key=lambda gap: abs(log(abs(gap.factor) or 1e-30)))]
    if not untouched or one.held.rank != other.held.rank:
        if tolerance > NOISY:
            return None
        # Several lines may do as much: one of them did nothing to this weight.
        such = [gap for gap in reversed(other.account.gaps) if abs(gap.factor / lacking - 1) <= tolerance]
    found = ((own, gap) for gap in such if (own := _beside(one, other, gap)) is not None)
    return next(found, None)


def _beside(one: Judged, other: Judged, gap: Gap) -> Gap | None:
    """Where a weight was left as it was while another one was changed."""
    # Experts are reduced on a line of their own; the lines that scale others may follow either one.
    ends = [mine for mine in one.account.gaps if _lines(mine)[1] == _lines(gap)[1]]
    same = next((mine for mine in ends if _lines(mine) == _lines(gap)), None)
    own = same or (ends[-1] if ends and one.held.rank == other.held.rank else None)
    if own is None or own.start is None or abs(own.factor - 1) > one.tolerance:
        return None
    return own


def _culprit(gap: Gap, ratio: float, spared: float) -> Culprit:
    assert gap.start is not None
    return Culprit(
        kind_of(gap.start), gap.rank, gap.start, factor=ratio, unrecorded=True, before=gap.end, spared=spared
    )


def _unseen(one: Judged) -> float:
    """What nobody recorded did to a weight."""
    return prod(gap.factor for gap in one.account.gaps)


def _places(one: Judged) -> list[tuple[object, ...]]:
    """What may be compared: weights on one rank and stage, and those of one parameter."""
    return [(one.cell.key, one.held.rank, one.held.param[0]), (one.cell.key, one.held.param)]


def _lines(gap: Gap) -> tuple[object, ...]:
    return tuple(event and (kind_of(event), line_of(event)) for event in (gap.start, gap.end))
