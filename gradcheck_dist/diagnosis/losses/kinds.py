"""Passes that are of one kind of data each (real and generated, source and target), and not parts of one batch.

A discriminator that is trained by a cross-entropy goes backward once for each kind, whose labels are all of one class,
and adds up such losses by design. So does one that tells the classes of what it is given besides (AC-GAN), by a second
cross-entropy, or beside a binary one: of that no label is known, but each kind has a line of its own. Batches of one
class, or of a line each, look the same, so the verdict stays open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.several_losses import OwnMeans, fits, line_of, own_weights, usual
from gradcheck_dist.diagnosis.losses.tasks import DECLARE
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import LossTerm
from gradcheck_dist.ledger.contributions import Contribution, ContributionKey, losses_of_rank
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.trace.label_hashes import one_class

BINARY = "binary_cross_entropy"
Kind = int | str
"""The class of all labels of a pass, or the line on which it begins."""


def kind_by_kind(target: Aim, objective: str, data: StepData, measured: list[Held]) -> OwnMeans | None:
    """What the weights are compared with where each pass is of a kind of its own, of several on each rank, and one mean
    over all tokens does not fit; None where that is not so."""
    kinds = {} if target.relative else _kinds(target, data)
    several = _has_each_rank_several(list(kinds.values()))
    if not several or fits(measured, target.contributions, target.expected):
        return None
    own = own_weights(target, objective, kinds.values())
    shares = [usual(measured, target.contributions, own, keys) for keys in kinds.values()]
    scaled = {
        key: own[key] * Fraction(share) for share, keys in zip(shares, kinds.values(), strict=True) for key in keys
    }
    shown = " and ".join(f"x {share:.4g}" for share in shares)
    reason = (
        "each pass's labels are of one class, or it has a binary term and a line of its own, as a discriminator's "
        f"kinds of data. Passes of one kind weigh {shown} of a mean over their own tokens: right where these are "
        f"losses of their own, too much where they are parts of one batch. {DECLARE}"
    )
    return OwnMeans(replace(target, expected=target.filled(scaled)), reasons=[reason])


def _kinds(target: Aim, data: StepData) -> dict[Kind, list[ContributionKey]]:
    """The contributions by what their passes are a kind of; {} where nothing tells it of one."""
    counted = {key: one for key, one in target.contributions.by_key.items() if target.tokens.get(key)}
    passes = Counter((key[0], line_of(one.gradient)) for key, one in counted.items())
    kinds: dict[Kind, list[ContributionKey]] = defaultdict(list)
    for key, one in counted.items():
        kind: Kind | None = _class_of(data, one)
        line = line_of(one.gradient)
        if kind is None and passes[key[0], line] == 1 and _has_binary_term(data, one.loss_rank, key[1:]):
            kind = line or None
        if kind is None:
            return {}
        kinds[kind].append(key)
    return kinds


def _class_of(data: StepData, one: Contribution) -> int | None:
    """The class that all labels of a pass are of, or of one of the losses that it adds up; None where there is none, or
    there are several."""
    if one.num_losses == 1 or one.loss_rank is None:
        return one_class(one.loss.num_labels if one.loss is not None else None, one.label_hash)
    losses = [loss for _, loss in losses_of_rank(data.events[one.loss_rank]).get(one.key[1:], ()) if loss]
    classes = {one_class(loss.num_labels, loss.label_hash) for loss in losses} - {None}
    return classes.pop() if len(classes) == 1 else None


def _has_binary_term(data: StepData, rank: int | None, slot: tuple[int, int]) -> bool:
    """Whether a pass adds a binary cross-entropy to its loss."""
    terms = (event for event in data.events[rank] if isinstance(event, LossTerm)) if rank is not None else ()
    return any(one.op.startswith(BINARY) for one in terms if (one.accumulation_step, one.microbatch) == slot)


def _has_each_rank_several(kinds: Sequence[Sequence[ContributionKey]]) -> bool:
    ranks = [{key[0] for key in keys} for keys in kinds]
    return len(kinds) > 1 and all(of_kind == ranks[0] for of_kind in ranks)
