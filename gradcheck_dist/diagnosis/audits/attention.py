"""What attention over several ranks that gave another gradient than its own leaves open."""

from __future__ import annotations

from gradcheck_dist.diagnosis.audits.exchanges import VERIFY
from gradcheck_dist.events import Site
from gradcheck_dist.ledger.attention import Unbalanced, unbalanced
from gradcheck_dist.ledger.tracks import StepData

WRITTEN = 0.002
"""Relative distance from a whole number within which a factor is taken for it."""


def open_attention(data: StepData) -> list[str]:
    """Why the verdict on a step is open: a reason for each function of which what came back is no attention's."""
    found: dict[tuple[str, str], Unbalanced] = {}
    for one in unbalanced(data.events):
        found.setdefault((one.first.function, _where(one.first.site)), one)
    return [_reason(function, where, one) for (function, where), one in found.items()]


def _reason(function: str, where: str, one: Unbalanced) -> str:
    wholes = [_whole(ratio) for ratio in (one.of_values, one.of_keys) if ratio is not None]
    times = next((f" (x {whole:.4g})" for whole in wholes if whole is not None), "")
    return (
        f"the gradients that {function} ({where}) gives back are not those of attention over ranks "
        f"{', '.join(map(str, sorted(one.events)))}: <gradient, values> is not <gradient, output>, or <gradient, keys> "
        f"not <gradient, queries>, summed over these ranks{times}. If it is attention, its "
        f"backward{_where_written(one.first.defined_at)} loses, or counts more than once, what other ranks want: "
        f"{VERIFY} with central differences whether the gradient is right"
    )


def _whole(ratio: float) -> float | None:
    """The number of ranks, or the part of as many, that a ratio is; None for any other: each step has its own."""
    if ratio <= 0:
        return None
    near = round(ratio) if ratio >= 1 else 1 / round(1 / ratio)
    return near if abs(near / ratio - 1) < WRITTEN else None


def _where(site: Site | None) -> str:
    return f"{site.file.rsplit('/', 1)[-1]}:{site.line}" if site is not None else "line unknown"


def _where_written(at: Site | None) -> str:
    return f" ({_where(at)})" if at is not None else ""
