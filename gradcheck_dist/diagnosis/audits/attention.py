"""What attention over several ranks that gave another gradient than its own leaves open."""

from __future__ import annotations

from math import inf, isfinite

from gradcheck_dist.diagnosis.audits.exchanges import VERIFY
from gradcheck_dist.events import Site
from gradcheck_dist.ledger.attention import Unbalanced, unbalanced
from gradcheck_dist.ledger.tracks import StepData

WRITTEN = 1e-3
"""Relative distance from a whole number within which a factor is taken for it."""


def open_attention(data: StepData) -> list[str]:
    """Why the verdict on a step is open: a reason for each function of which what came back is no attention's."""
    found: dict[tuple[str, str], Unbalanced] = {}
    for one in unbalanced(data.events):
        found.setdefault((one.first.function, _where(one.first.site)), one)
    return [_reason(function, where, one) for (function, where), one in found.items()]


def _reason(function: str, where: str, one: Unbalanced) -> str:
    sums = [
        f"those of its {which} come to {_times(ratio)} what {of} ask for"
        for which, of, ratio in (
            ("values", "those that arrive at its output", one.of_values),
            ("keys", "those of its queries", one.of_keys),
        )
        if ratio is not None
    ]
    return (
        f"the gradients that {function} ({where}) gives back are not those of attention over ranks "
        f"{', '.join(map(str, sorted(one.events)))}: summed over these, {' and '.join(sums)}. If it is attention, its "
        f"backward{_where_written(one.first.defined_at)} loses, or counts more than once, what other ranks want: "
        f"{VERIFY} with central differences whether the gradient is right"
    )


def _times(ratio: float) -> str:
    """A number of ranks, or a part of as many; anything else is another number in each step."""
    whole = ratio if ratio >= 1 else 1 / ratio if ratio > 0 else inf
    written = isfinite(whole) and abs(round(whole) / whole - 1) < WRITTEN
    return f"x {ratio:.4g} of" if written else "something else than"


def _where(site: Site | None) -> str:
    return f"{site.file.rsplit('/', 1)[-1]}:{site.line}" if site is not None else "line unknown"


def _where_written(at: Site | None) -> str:
    return f" ({_where(at)})" if at is not None else ""
