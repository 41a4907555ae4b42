"""Auxiliary loss terms: where they were evaluated, on how many positions, with which weight in the backward root."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from gradcheck_dist.events import Event, Loss, LossGradient
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions

MAIN = "main"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a term whose gradient arrived.

    `key` is the contribution that it belongs to. `ordinal` counts the evaluations of one contribution in one pass
    (one a layer); `copy` numbers the ranks of one data coordinate and pipeline stage (tensor parallel).
    """

    key: ContributionKey
    rank: int
    copy: int
    loss: Loss
    gradient: LossGradient

    @property
    def num_tokens(self) -> int | None:
        return self.gradient.num_tokens if self.gradient.num_tokens is not None else self.loss.num_tokens


@dataclass(frozen=True)
class Term:
    """A term of a step: `coefficient` is its factor in the objective, None where nobody declared it."""

    name: str
    coefficient: float | None
    evaluations: tuple[Evaluation, ...]

    def tokens(self, *, every_copy: bool) -> dict[ContributionKey, int] | None:
        """Positions of each contribution in one evaluation of the term; None where they are unknown or differ between
        its evaluations.

        Args:
            every_copy: whether ranks of one data coordinate hold parts of the sequence (sequence parallel), whose
                positions add up, and not copies.
        """
        sizes: dict[ContributionKey, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for one in self.evaluations:
            if one.num_tokens is None:
                return None
            sizes[one.key][one.copy].add(one.num_tokens)
        counts: dict[ContributionKey, int] = {}
        for key, of_copy in sizes.items():
            if any(len(found) != 1 for found in of_copy.values()):
                return None
            parts = [next(iter(found)) for found in of_copy.values()]
            if not every_copy and len(set(parts)) > 1:
                return None
            counts[key] = sum(parts) if every_copy else parts[0]
        return counts

    @property
    def has_copies(self) -> bool:
        return any(one.copy for one in self.evaluations)


def auxiliary_terms(events: Mapping[int, list[Event]], contributions: Contributions) -> list[Term]:
    """The terms of a step beside the main loss, by name."""
    found: dict[str, list[Evaluation]] = defaultdict(list)
    coefficients: dict[str, set[float | None]] = defaultdict(set)
    copies: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for rank, of_rank in sorted(events.items()):
        losses = {event.loss_id: event for event in of_rank if isinstance(event, Loss)}
        seen: set[int] = set()  # a split backward may come by twice
        for event in of_rank:
            loss = losses.get(event.loss_id) if isinstance(event, LossGradient) else None
            if not isinstance(event, LossGradient) or loss is None or loss.term == MAIN or event.loss_id in seen:
                continue
            seen.add(event.loss_id)
            coordinate = contributions.coordinate.get(rank, rank)
            ranks = copies[coordinate, event.stage]
            if rank not in ranks:
                ranks.append(rank)
            key = (coordinate, event.accumulation_step, event.microbatch)
            found[loss.term].append(Evaluation(key, rank, ranks.index(rank), loss, event))
            coefficients[loss.term].add(loss.coefficient)
    return [
        Term(name, next(iter(values)) if len(values := coefficients[name]) == 1 else None, tuple(evaluations))
        for name, evaluations in sorted(found.items())
    ]
