"""The norm that an unrecorded change of all gradients left behind: what a clip by hand was given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from types import UnionType

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.norms.clips import is_round
from gradcheck_dist.diagnosis.norms.step_norms import Part, StepNorms, norm_of, own_error
from gradcheck_dist.events import Clip, Event, OptimizerStep
from gradcheck_dist.ledger.tracks import ParamKey, StepData


def norm_afterwards(case: Case, data: StepData, norms: StepNorms) -> float | None:
    """The norm of all gradients where the culprit's bracket ends; None where it is not known as one number."""
    before = case.culprit.before
    if before is None:
        return None
    return norm_left({held.rank for held in case.held}, data, norms, type(before))


def norm_left(
    ranks: Collection[int], data: StepData, norms: StepNorms, ends: type[Event] | UnionType = Clip | OptimizerStep
) -> float | None:
    """The norm of all gradients of these ranks' models at the first clip or step, which has to be of a kind; None where
    it is not known as one number."""
    found = []
    for group in {norms.together(rank) for rank in ranks}:
        parts = [part for (rank, _), part in norms.parts.items() if rank in group]
        if any(_first_clip(data, rank, ends) is None for rank in group):
            return None
        norm = norm_of(parts)
        if not parts or not norm.known:
            return None
        # A matrix that is tied may be counted once or with each of its copies: who clips does either.
        either = (norm.middle,) if norm.exact else (norm.low, norm.high, *_counted_once(parts))
        if not (value := next((one for one in either if norm.exact or is_round(one, own_error(parts))), None)):
            return None
        found.append(value)
    return found[0] if found and max(found) <= min(found) * (1 + 1e-3) else None


def _counted_once(parts: Sequence[Part]) -> Iterator[float]:
    """The norms with one of a tied matrix's copies, which differ where nobody adds them up."""
    names: dict[ParamKey, set[ParamKey | None]] = defaultdict(set)
    for part in parts:
        names[part.key].add(part.own)
    for chosen in zip(*(sorted(of_key, key=str) for of_key in names.values() if len(of_key) > 1), strict=False):
        yield norm_of(part for part in parts if len(names[part.key]) == 1 or part.own in chosen).middle


def _first_clip(data: StepData, rank: int, kind: type[Event] | UnionType) -> object | None:
    """The event at which a rank's norms were taken, when it is of this kind."""
    ends = [event for event in data.events[rank] if isinstance(event, Clip | OptimizerStep)]
    return ends[0] if ends and isinstance(ends[0], kind) else None


def error_of(case: Case, norms: StepNorms) -> float:
    """Relative error that a norm of a case's gradients may have."""
    return own_error(_parts(case, norms))


def _parts(case: Case, norms: StepNorms) -> list[Part]:
    ranks = {rank for held in case.held for rank in held.ranks}
    return [part for (rank, _), part in norms.parts.items() if rank in ranks]
