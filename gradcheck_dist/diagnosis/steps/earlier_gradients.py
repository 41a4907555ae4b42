"""Buffers of the trainer's own that nobody emptied: what an optimizer reads holds what it read a step before.

Of .grad, the first sample of a step shows what is left (GS402). A main_grad, or a shard to which reductions are added,
is known only by what optimizers read: no combination of the step's contributions, but the right one plus the last read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gradcheck_dist.diagnosis.audit import first_event_at
from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.diagnosis.rules import gs402_stale_gradient as rule
from gradcheck_dist.diagnosis.steps.changed_in import NO_COMBINATION
from gradcheck_dist.diagnosis.steps.reads import Read
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.steps.waiting import Copy
from gradcheck_dist.diagnosis.words import in_short

LEAST_VALUES = 8
SAME = 1e-3
"""Relative. In a coarser type, so many of its spacings:"""
SPACINGS = 8
MOST_ALIKE = 0.99
"""Cosine of the angle between two gradients of which one is not told from the other."""
CHANGED = 0.05
"""Relative. By less an optimizer may have changed in place what it had read (weight decay)."""
PUT_THERE = "what .grad held"

Parts = tuple[float, float]
"""Of the step's right gradient, and of what was read before, so much."""


@np.errstate(all="ignore")  # a damaged trace holds any number
def tell_earlier_gradients(verdicts: Sequence[StepVerdict]) -> None:
    """Find what was not emptied between two steps that follow one another."""
    for before, verdict in pairwise(verdicts):
        if verdict.context.step != before.context.step + 1 or verdict.context.relative:
            continue
        parts: dict[Copy, Parts | None] = {
            copy: _parts(read, before.reads[copy])
            for copy, read in verdict.reads.items()
            if read.right is not None and copy in before.reads
        }
        found = {copy for copy, made_of in parts.items() if made_of and _is_kept(made_of, before.reads[copy])}
        if found:
            _tell(verdict, found, whole=len(found) == len(parts))
        elif parts and (made_of := _common(list(parts.values()))):
            _say_what_of(verdict, made_of)
        _leave_put_there_open(before, verdict)


def _leave_put_there_open(before: StepVerdict, verdict: StepVerdict) -> None:
    """Accuse nobody of what .grad held before the step's first pass where that is nothing of the step before: a line
    put it there (a penalty's gradient in closed form)."""
    left = {
        copy: _is_of_step(read.left, before.reads[copy])
        for copy, read in verdict.reads.items()
        if read.left is not None and copy in before.reads
    }
    names = sorted({copy[0][1] for copy, is_of_step in left.items() if is_of_step is False})
    if not names or True in left.values():
        return
    accusing = [one for one in verdict.findings if one.code == rule.CODE and one.pattern == rule.ADDED]
    for finding in accusing:
        verdict.take_away(finding)
    if accusing:
        verdict.reasons.append(
            f"{PUT_THERE} of {in_short(names)} before the step's first backward pass is neither what the optimizer "
            f"read in step {before.context.step} nor made of what that step's passes brought: a line put it there "
            "(the gradient of a penalty, computed by hand), which may be meant, or changed what was left. What is "
            "wrong besides is told"
        )


def _is_of_step(left: np.ndarray, before: Read) -> bool | None:
    """Whether what was left is made of what was read in the step before and of what its passes brought; None where too
    little is sampled to tell."""
    parts = np.vstack([before.values[None], before.passes])
    told = np.isfinite(left) & np.isfinite(before.values)
    parts = np.nan_to_num(parts[:, told])
    sizes = np.linalg.norm(parts, axis=1)
    parts = parts[sizes > 0] / sizes[sizes > 0, None]
    size = float(np.linalg.norm(left[told]))
    if np.count_nonzero(told) < LEAST_VALUES + 2 * len(parts) or not len(parts) or not size:
        return None
    solved = np.linalg.lstsq(parts.T, left[told], rcond=None)[0]
    return bool(np.linalg.norm(parts.T @ solved - left[told]) <= CHANGED * size)


def let_go(before: StepVerdict, verdict: StepVerdict) -> None:
    """Forget what was read in a step, but for what the one behind it or it itself is asked about: in a long run most
    steps are right."""
    asked = {copy for copy, read in verdict.reads.items() if _is_asked(read)}
    before.reads = {copy: read for copy, read in before.reads.items() if copy in asked or _is_asked(read)}


def _is_asked(read: Read) -> bool:
    return read.right is not None or read.left is not None


def _parts(read: Read, before: Read) -> Parts | None:
    """What a gradient is made of, where it is the step's right one and what was read before, each by a number."""
    assert read.right is not None
    told = np.isfinite(read.values) & np.isfinite(read.right) & np.isfinite(before.values)
    if np.count_nonzero(told) < LEAST_VALUES:
        return None
    both = np.stack([read.right[told], before.values[told]], axis=1)
    sizes = np.linalg.norm(both, axis=0)
    if not (sizes.all() and np.isfinite(sizes).all()) or abs(both[:, 0] @ both[:, 1]) > MOST_ALIKE * sizes.prod():
        return None
    solved = np.linalg.lstsq(both / sizes, read.values[told], rcond=None)[0]
    off = float(np.linalg.norm(both / sizes @ solved - read.values[told]))
    return (solved[0] / sizes[0], solved[1] / sizes[1]) if off <= _allowed(read) * np.abs(solved).min() else None


def _allowed(read: Read) -> float:
    return max(SAME, SPACINGS * read.epsilon)


def _is_kept(made_of: Parts, before: Read) -> bool:
    """Whether all that was read before is still there, beside all of the step's own: as it was before the clip, which
    acted on a copy, or clipped."""
    own, earlier = made_of
    return abs(own - 1) <= 2 * SAME and any(abs(earlier / one - 1) <= 2 * SAME for one in (1.0, before.clip) if one)


def _common(found: list[Parts | None]) -> Parts | None:
    """The numbers that all gradients of a step have in common."""
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return None
    first = known[0]
    same = all(abs(one[at] / first[at] - 1) <= 2 * SAME for one in known for at in (0, 1))
    return first if same else None


def _say_what_of(verdict: StepVerdict, made_of: Parts) -> None:
    """Name what these gradients are made of: a running mean is meant, a clip in front of which a buffer was not emptied
    gives such numbers, too."""
    own, earlier = made_of
    words = (
        f"it is x {own:.4g} of this step's right gradient and x {earlier:.4g} of what the optimizer read in step "
        f"{verdict.context.step - 1}: a running mean, or a buffer that nobody emptied, in front of a clip"
    )
    for one in verdict.held:
        if NO_COMBINATION in one.reason:
            one.changed_in = f"{one.changed_in}. And {words}" if one.changed_in else words


def _tell(verdict: StepVerdict, found: set[Copy], *, whole: bool) -> None:
    """Say so, in the place of the reason why nothing is known of these gradients. `whole`: all that were asked are so,
    and those of which no values were kept are taken for the same."""
    lost = [one for one in verdict.held if NO_COMBINATION in one.reason and (whole or (one.param, one.rank) in found)]
    for one in lost:
        one.reason, one.changed_in = f"it holds what the optimizer read in step {verdict.context.step - 1} as well", ""
    names = sorted({one.param[1] for one in lost})
    (param, rank), *_ = sorted(found, key=lambda copy: (copy[1], copy[0]))
    event = verdict.reads[param, rank].event
    finding = Finding(
        code=rule.CODE,
        name=rule.NAME,
        severity="error",
        step=verdict.context.step,
        factor=Factor(observed=None),
        pattern=rule.ADDED,
        units=sorted({verdict.units.get(one.param, one.param[1]) for one in lost}),
        num_parameters=len({one.param for one in lost}),
        ranks=sorted({one.rank for one in lost}),
        first_event=first_event_at(event, rank),
        explanation=f"What the optimizer read of {in_short(names)} is this step's right gradient and, once more, what "
        "it had read in the step before: a buffer to which gradients are added (main_grad, a shard) was not emptied.",
        fix="Empty the buffer from which the optimizer's gradients are taken after each optimizer step.",
        steps=[verdict.context.step],
    )
    verdict.found(finding, None)
    verdict.audited.add(rule.CODE)
