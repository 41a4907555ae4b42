"""Where a gradient stopped being a combination of contributions, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import msgspec

from gradcheck_dist.diagnosis.causes.account import event_at
from gradcheck_dist.diagnosis.causes.own_lines import lines_that_write
from gradcheck_dist.diagnosis.causes.places import kind_of
from gradcheck_dist.diagnosis.steps.reduced_early import early_in_words, reduced_early
from gradcheck_dist.diagnosis.weights.cells import Cell, Held, judge
from gradcheck_dist.diagnosis.words import that_write
from gradcheck_dist.events import OWN_OPTIMIZER, Backward, Event
from gradcheck_dist.ledger.buffers import Entry
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import StepData

LINES = "what runs "
"""Begins the words for lines of the user's, wherever they stand in a reason."""
NO_COMBINATION = "no combination"
"""Stands in the reason why such a gradient was not observed."""


def name_places(
    measured: Sequence[Held],
    data: StepData,
    contributions: Contributions,
    expected: Mapping[ContributionKey, Fraction],
) -> None:
    """Say of each gradient that is no combination of contributions any more where it stopped being one, and what its
    weights were until then. They accuse nobody: what follows may make up for them."""
    for held in measured:
        if NO_COMBINATION not in held.reason:
            continue
        track = data.tracks[held.param][held.rank]
        if (early := reduced_early(data, track)) is not None:
            held.changed_in = (
                f"{place_in_words('reduce', short_line(early), None)} {early_in_words(data, track, early)}"
            )
            continue
        last: tuple[Event, Entry] | None = None
        for entry in held.replay.history(held.rank):
            event = event_at(data, held.rank, entry.seq)
            if event is None or not entry.sampled:
                continue
            if entry.observed is None and last is None and isinstance(event, Backward):
                held.changed_in = (
                    f"{place_in_words('backward', short_line(event), None)} changes it by more than a factor"
                )
            if entry.observed is None and last is not None:
                start, state = last
                place = place_in_words(kind_of(start), short_line(start), None if event is start else event)
                inside = (one for one in data.events[held.rank] if start.seq < one.seq < event.seq)
                params = {data.tracks[held.param][held.rank].param.id}
                lines = lines_that_write(data, held.rank, params, inside)
                place += f" ({that_write(lines, 'it')})" if lines else ""
                judged = judge([replace(held, observed=state.observed, stderr=state.stderr, nominal=state.nominal)],
                               contributions, dict(expected))[0].cells  # fmt: skip
                held.changed_in = f"{place} changes it by more than a factor. {_until_then(judged)}"
                break
            last = (event, entry) if entry.observed is not None and entry.stderr is not None else None


def _until_then(cells: Sequence[Cell]) -> str:
    if not cells:
        return "Up to there it is one"
    if all(cell.right for cell in cells):
        return "Up to there its weights are right"
    ratios = {cell.ratio if abs(cell.ratio) > cell.tolerance else 0.0 for cell in cells}
    sizes = " to ".join(dict.fromkeys(f"x {ratio:.4g}" for ratio in (min(ratios), max(ratios))))
    return f"Up to there its weights are {sizes}, which what follows may make up for"


def short_line(event: object) -> str:
    """Its line; "" where that is not known: of an own optimizer's step it is that at which the step was noticed."""
    site = getattr(event, "site", None)
    return site.short if site is not None and getattr(event, "optimizer", "") != OWN_OPTIMIZER else ""


def place_in_words(kind: str, line: str, before: msgspec.Struct | None) -> str:
    start = f"{kind} at {line}" if line else f"the {kind} event"
    if before is None:
        return f"{LINES}in the {start}"
    tag, end = str(before.__struct_config__.tag), short_line(before)
    return f"{LINES}between the {start} and the {tag}{f' at {end}' if end else ''}"
