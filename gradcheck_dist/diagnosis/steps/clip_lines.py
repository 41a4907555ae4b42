"""A clip by hand that shows at its line, whatever else is wrong, and where nothing is known to be wrong.

A line that multiplies all gradients where they lie is recorded with its number. Where that is no number that somebody
wrote, and all gradients have a norm behind it that is one, the line clips. That needs no weights that are all off alike
(losses of one rank may be), and no expectation of them, which losses that count nothing have only if they come out
right.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.causes.own_lines import params_on
from gradcheck_dist.diagnosis.causes.places import line_of
from gradcheck_dist.diagnosis.norms.clips import is_round
from gradcheck_dist.diagnosis.norms.left_norms import norm_left
from gradcheck_dist.diagnosis.norms.step_norms import StepNorms, own_error
from gradcheck_dist.diagnosis.steps.hand_clip import SAME, TOO_VAGUE, HandClip
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.written import is_exactly_written
from gradcheck_dist.events import SCALED, Backward, Clip, GradWrite, OptimizerStep, Reduce
from gradcheck_dist.ledger.tracks import StepData


def clip_of_line(held: Sequence[Held], data: StepData, norms: StepNorms) -> HandClip | None:
    """The clip that the last line before the optimizer is which multiplies all gradients alike, on all ranks."""
    found = _line_of_all(held, data, norms)
    if found is None:
        return None
    write, factor, norm, tolerance = found
    if not is_round(norm, tolerance):
        return None
    line = f" at {write.site.short}" if write.site is not None else ""
    text = (
        f"step {data.step}: gradients were clipped by hand to norm {float(f'{norm:.2g}'):g} (x {factor:.4g})"
        f"{line}; weights are freed of it"
    )
    return HandClip(factor, norm, text, line=line)


def factor_of_line(held: Sequence[Held], data: StepData, norms: StepNorms) -> float | None:
    """The computed number by which that line multiplies, where what it leaves has no norm that somebody wrote: the line
    may clip by another norm than theirs."""
    found = _line_of_all(held, data, norms)
    return None if found is None or is_round(found[2], found[3]) else found[1]


def _line_of_all(
    held: Sequence[Held], data: StepData, norms: StepNorms
) -> tuple[GradWrite, float, float, float] | None:
    """The last line before the optimizer that multiplies all gradients on all ranks by one computed number below 1, as
    the first rank has it; that number, the norm behind it and how well that is known."""
    ranks = {rank for one in held for rank in (one.rank, *one.ranks)}
    writes = [_last_write(data, held, rank) for rank in sorted(ranks)]
    if not writes or None in writes:
        return None
    factors = [write.factor for write in writes if write is not None and write.factor is not None]
    if len(factors) < len(writes) or not 0 < max(factors) < 1 or max(factors) > min(factors) * (1 + SAME):
        return None
    norm = None if is_exactly_written(factors[0]) else norm_left(ranks, data, norms)
    tolerance = own_error(list(norms.parts.values()))
    if norm is None or tolerance > TOO_VAGUE or writes[0] is None:
        return None
    return writes[0], factors[0], norm, tolerance


def _last_write(data: StepData, held: Sequence[Held], rank: int) -> GradWrite | None:
    """What a rank's last line did that changed gradients behind backward and reductions; None where it is not one
    number for all."""
    end = next((event.seq for event in data.events[rank] if isinstance(event, Clip | OptimizerStep)), None)
    start = max((event.seq for event in data.events[rank] if isinstance(event, Backward | Reduce)), default=-1)
    writes = [event for event in data.events[rank] if isinstance(event, GradWrite) and event.params is not None]
    writes = [event for event in writes if end is not None and start < event.seq < end]
    if not writes or writes[-1].op != SCALED:
        return None
    last = [event for event in writes if line_of(event) == line_of(writes[-1])]
    changed = [param for event in last for param in data.params_of(rank, event.params)]
    alike = len({event.factor for event in last}) == 1 and len(set(changed)) == len(changed)
    return last[-1] if alike and params_on(data, held, rank) <= set(changed) else None
