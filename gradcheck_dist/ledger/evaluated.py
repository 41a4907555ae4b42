"""Losses that were evaluated in a step and never went backward: who counts tokens may count theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gradcheck_dist.events import Event, Loss
from gradcheck_dist.ledger.contributions import Contributions, losses_of_rank
from gradcheck_dist.wording import plural


def left_aside(events: Mapping[int, Sequence[Event]], contributions: Contributions) -> int | None:
    """How many tokens of a step have a loss that asked for a gradient and got none, on all data ranks.

    Labels that other losses of the rank have as well count once, and not at all where one of these went backward.

    Returns:
        None where some such loss counts nothing that is known.
    """
    total = 0
    for ranks in contributions.ranks_of_coordinates():
        counts = [_of_rank(events.get(rank, ())) for rank in ranks]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None
        total += max(known, default=0)
    return total


def told_evaluated(events: Mapping[int, Sequence[Event]]) -> list[str]:
    """Lines on which some losses of a step went backward and others never did, which may have been meant to: a
    backward() behind a loop over microbatches is of the last one alone."""
    found: dict[str, list[int]] = {}
    for of_rank in events.values():
        went = {
            loss.loss_id for pairs in losses_of_rank(list(of_rank)).values() for _, loss in pairs if loss is not None
        }
        labels = {event.label_hash for event in of_rank if isinstance(event, Loss) and event.loss_id in went}
        lines: dict[str, list[bool]] = defaultdict(list)
        for event in {event.loss_id: event for event in of_rank if isinstance(event, Loss)}.values():
            told_apart = event.label_hash is not None and (event.loss_id in went or event.label_hash not in labels)
            if event.term == "main" and event.requires_grad and event.site is not None and told_apart:
                lines[event.site.short].append(event.loss_id in went)
        for line, each in lines.items():
            if 0 < sum(each) < len(each):
                counts = found.setdefault(line, [0, 0])
                found[line] = [counts[0] + sum(each), counts[1] + len(each)]
    return [
        f"of {plural(number, 'loss')} that {line} evaluates with gradients, {those} went backward: right where "
        "the others are only looked at (torch.no_grad() would say so)"
        for line, (those, number) in sorted(found.items())
    ]


def _of_rank(events: Sequence[Event]) -> int | None:
    went = [loss for pairs in losses_of_rank(list(events)).values() for _, loss in pairs if loss is not None]
    ids, labels = {loss.loss_id for loss in went}, {loss.label_hash for loss in went if loss.label_hash is not None}
    stayed = {
        loss.label_hash if loss.label_hash is not None else loss.loss_id: loss.num_tokens
        for loss in events
        if isinstance(loss, Loss) and loss.term == "main" and loss.requires_grad and loss.loss_id not in ids
        if loss.label_hash not in labels
    }
    counts = [count for count in stayed.values() if count is not None]
    return sum(counts) if len(counts) == len(stayed) else None
