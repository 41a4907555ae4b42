"""A rank's trace without some of a step's passes, and without parameters that no others reach."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gradcheck_dist.events import Backward, Event, HandedOn, Loss, LossGradient, Norms, StepEnd
from gradcheck_dist.ledger.tracks import Slot
from gradcheck_dist.trace.reader import RankTrace


def without_passes(trace: RankTrace, step: int, slots: Set[Slot], gone: Set[int] = frozenset()) -> RankTrace:
    """The trace without the passes of these slots in one step, the others numbered anew, and with parameters that are
    `gone` taken for frozen."""
    sets = {key: tuple(one for one in ids if one not in gone) for key, ids in trace.param_sets.items()}
    emptied = {key for key, ids in sets.items() if not ids and trace.param_sets[key]}
    mine = [event for event in trace.events if event.step == step]
    of_others = {one.loss_id for one in mine if isinstance(one, LossGradient) and _slot(one) not in slots}
    of_these = {one.loss_id for one in mine if isinstance(one, LossGradient)} - of_others

    def is_theirs(event: Event) -> bool:
        return (
            _slot(event) in slots
            or getattr(event, "params", None) in emptied
            or (isinstance(event, Loss) and event.loss_id in of_these)
        )

    left = [event for event in mine if not is_theirs(event)]
    kept = sorted({one.accumulation_step for one in left if isinstance(one, Backward)})
    number = {before: now for now, before in enumerate(kept)}
    events = [event for event in trace.events if event.step != step]
    events += [_numbered(_told_less(event, len(mine) - len(left)), number) for event in left]
    if not gone:
        return replace(trace, events=events)
    return replace(
        trace,
        params={
            id: msgspec.structs.replace(param, requires_grad=False) if id in gone else param
            for id, param in trace.params.items()
        },
        param_sets=sets,
        events=events,
        norms=[_norms_without(one, gone) for one in trace.norms],
    )


def _slot(event: Event) -> Slot | None:
    k, m = getattr(event, "accumulation_step", None), getattr(event, "microbatch", None)
    return (k, m) if k is not None and m is not None else None


def _numbered(event: Event, number: Mapping[int, int]) -> Event:
    changed: dict[str, Any] = {
        name: number[value]
        for name in ("accumulation_step", "first_of_forward")
        if (value := getattr(event, name, None)) is not None and number.get(value, value) != value
    }
    if isinstance(event, HandedOn):
        changed["passes"] = tuple((number.get(k, k), m) for k, m in event.passes)
    return msgspec.structs.replace(event, **changed) if changed else event


def _told_less(event: Event, num: int) -> Event:
    if isinstance(event, StepEnd) and event.num_events is not None:
        return msgspec.structs.replace(event, num_events=max(event.num_events - num, 0))
    return event


def _norms_without(norms: Norms, gone: Set[int]) -> Norms:
    rows = np.frombuffer(norms.rows, dtype="<i4").reshape(-1, 3)
    left = ~np.isin(rows[:, 0], list(gone))
    if left.all():
        return norms
    values = np.frombuffer(norms.values, dtype="<f8")[left]
    return msgspec.structs.replace(norms, rows=rows[left].tobytes(), values=values.tobytes())
