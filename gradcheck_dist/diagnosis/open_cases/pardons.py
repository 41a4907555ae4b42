"""Wrong weights that are no finding: what may be meant, or may have come right where nobody looked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.open_cases.coefficient import coefficient
from gradcheck_dist.diagnosis.open_cases.emptied import frozen
from gradcheck_dist.diagnosis.open_cases.givers import mean_of_givers
from gradcheck_dist.diagnosis.open_cases.inside_step import gathered_otherwise, reduced_inside
from gradcheck_dist.diagnosis.open_cases.local_sgd import post_local_sgd
from gradcheck_dist.diagnosis.open_cases.masked_sequences import masked_sequences
from gradcheck_dist.diagnosis.open_cases.own_parameters import experts, own_mean
from gradcheck_dist.diagnosis.open_cases.own_rates import own_rates
from gradcheck_dist.diagnosis.open_cases.parted_heads import parted_head
from gradcheck_dist.diagnosis.open_cases.tasks_apart import tasks_apart
from gradcheck_dist.diagnosis.open_cases.unread import not_read_yet, other_parts, read_elsewhere, turned_round
from gradcheck_dist.diagnosis.open_cases.unusual import unusual
from gradcheck_dist.ledger.tracks import StepData

Pardon = Callable[[Case, StepData], str | None]
"""Why a case accuses nobody, in words that say what would tell; None where it may accuse."""
PARDONS: tuple[Pardon, ...] = (
    *(coefficient, experts, frozen, own_mean, reduced_inside, gathered_otherwise),
    *(not_read_yet, turned_round, read_elsewhere, other_parts, masked_sequences, mean_of_givers),
    *(post_local_sgd, own_rates, parted_head, tasks_apart, unusual),
)


def leave_open(
    cases: Iterable[Case], data: StepData, pardons: Sequence[Pardon] = PARDONS
) -> tuple[list[Case], list[str]]:
    """The cases that no pardon leaves open, and the reasons of those that one does, each reason once."""
    left, reasons = list(cases), dict[str, None]()
    for pardon in pardons:
        asked = [(case, pardon(case, data)) for case in left]
        left = [case for case, reason in asked if reason is None]
        reasons |= dict.fromkeys(reason for _, reason in asked if reason is not None)
    return left, list(reasons)
