"""A loss scale that the trainer's own line takes out of the gradients again: neither the loss nor that line is wrong.

Such a line is no hand of the ledgers, so what happened in its bracket may be its doing and somebody else's (a clip by
parameter, a division by too few tokens). Freed of the scale, the loss and the bracket tell what is off besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

from gradcheck_dist.diagnosis.causes.account import Account, Gap
from gradcheck_dist.diagnosis.causes.culprit import culprit_of_gap
from gradcheck_dist.diagnosis.causes.hands import Judged
from gradcheck_dist.diagnosis.causes.own_lines import between
from gradcheck_dist.diagnosis.causes.vocabulary import is_scale
from gradcheck_dist.diagnosis.weights.degrees import ONCE, SAME, is_of_degrees
from gradcheck_dist.diagnosis.weights.named_counts import common_numbers
from gradcheck_dist.diagnosis.weights.written import scale_of
from gradcheck_dist.events import GradWrite
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import StepData


def free_of_scales(data: StepData, contributions: Contributions, every: Sequence[Judged]) -> None:
    """Take each loss scale out of the loss's share, and of the bracket whose lines divide by it, where that leaves less
    of the losses to explain. Sums that ranks and passes divide at most carry none: what is divided by there is a number
    of tokens, which may be a power of two as well."""
    known: dict[tuple[object, ...], float] = {}
    counted = {key: one.weight for key, one in contributions.by_key.items() if one.num_tokens is not None}
    sums = {key for key, weight in counted.items() if not weight or is_of_degrees(weight, contributions, SAME, ONCE)}
    scales = [number.factor for number in common_numbers(contributions) if is_scale(number.factor, SAME)]
    for one in every:
        if one.cell.key in sums:
            continue
        root, gaps = one.account.root, list(one.account.gaps)
        for index, gap in enumerate(gaps):
            key = (one.held.param, gap.rank, id(gap.start), id(gap.end))
            if key not in known:
                known[key] = _scale(data, one, gap, scales)
            scale, documented = known[key], one.account.documented
            if documented > 0 and abs(log(documented / scale)) < abs(log(documented)):
                gaps[index] = replace(gap, factor=gap.factor * scale, written=gap.written / scale)
                root /= scale
                break
        old = one.account
        one.account = Account(root, old.steps, gaps, old.arrived, old.leaf, old.by_hand)


def _scale(data: StepData, one: Judged, gap: Gap, scales: Sequence[float]) -> float:
    """What lines of the trainer's own take out of a gradient in a bracket, or have to; 1 where nothing. `scales`: those
    by which lines multiply all losses. One that is known is the losses', whatever another line divides by."""
    track = data.tracks[one.held.param].get(gap.rank)
    if track is None or gap.inside:
        return 1.0
    for event in between(data, culprit_of_gap(gap, one.account), gap.rank):
        written = isinstance(event, GradWrite) and track.param.id in data.params_of(gap.rank, event.params)
        if written and (scale := scale_of(event)) is not None:
            return scales[0] if len(scales) == 1 else scale
    removed = [scale for scale in scales if abs(gap.factor * scale - 1) <= SAME]
    if not removed and len(scales) == 1 and gap.factor > 0 and is_scale(1 / gap.factor, SAME):
        return scales[0]
    return removed[0] if removed else 1.0
