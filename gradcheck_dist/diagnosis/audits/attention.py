"""What attention over several ranks that gave another gradient than its own leaves open."""

from __future__ import annotations

from gradcheck_dist.diagnosis.audits.exchanges import BY_VERIFY
from gradcheck_dist.events import Site
from gradcheck_dist.ledger.attention import Unbalanced, unbalanced
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.wording import numbered

WRITTEN = 0.002
"""Relative distance from a whole number within which a factor is taken for it."""


def open_attention(data: StepData) -> list[str]:
    """Why the verdict on a step is open: a reason for each function of which what came back is no attention's."""
    found: dict[tuple[str, Site | None], Unbalanced] = {}
    for one in unbalanced(data.events):
        found.setdefault((one.first.function, one.first.site), one)
    return [_reason(one) for one in found.values()]


def _reason(one: Unbalanced) -> str:
    first = one.first
    where = first.site.short if first.site is not None else "line unknown"
    written = f" ({first.defined_at.short})" if first.defined_at is not None else ""
    wholes = [_whole(ratio) for ratio in (one.of_values, one.of_keys) if ratio is not None]
    times = next((f" (x {whole:.4g})" for whole in wholes if whole is not None), "")
    return (
        f"the gradients that {first.function} ({where}) gives back are not those of attention over "
        f"{numbered('rank', one.events)}: <gradient, values> is not <gradient, output>, or <gradient, keys> "
        f"not <gradient, queries>, summed over these ranks{times}. If it is attention, its "
        f"backward{written} loses, or counts more than once, what other ranks want: "
        f"{BY_VERIFY}"
    )


def _whole(ratio: float) -> float | None:
    """The number of ranks, or the part of as many, that a ratio is; None for any other: each step has its own."""
    if ratio <= 0:
        return None
    near = round(ratio) if ratio >= 1 else 1 / round(1 / ratio)
    return near if abs(near / ratio - 1) < WRITTEN else None
