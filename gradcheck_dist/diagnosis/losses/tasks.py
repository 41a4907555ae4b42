"""Losses of one forward pass that are differentiated one by one: tasks whose gradients the program combines itself.

Gradient surgery takes each task's gradient on one forward pass and projects them on one another; MGDA weighs them. Each
such loss is a mean over its own tokens, as each summand of a pass that adds up several is, and a coefficient before it
may be meant. What all of them lack is judged: where nothing is written before any, a division by forward passes or
ranks. Parts of one batch look like tasks where they reach the same parameters or have unlike numbers of labels, so
there the verdict stays open.

Where the program's lines treat the passes of one forward apart, they combine tasks by numbers that nobody expects
anything of. Then only what of whole forward passes is not there at all accuses anybody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.several_losses import (
    SAME,
    OwnMeans,
    fits,
    line_of,
    own_weights,
    reached_by,
    usual,
)
from gradcheck_dist.diagnosis.weights.cells import SIGMAS, Held, judge
from gradcheck_dist.diagnosis.weights.degrees import same
from gradcheck_dist.events import AmpScale, Backward, OptimizerStep
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.one_forward import Forwards, forwards_of
from gradcheck_dist.ledger.tracks import ParamKey, StepData

DECLARE = "gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) on each tells"
GONE = 1e-3
"""A weight, relative to the largest, that is as good as none."""


def task_by_task(target: Aim, objective: str, data: StepData, measured: list[Held]) -> OwnMeans | None:
    """What the weights are compared with where each forward pass is differentiated in several passes, and one mean over
    all tokens does not fit; None where that is not so."""
    counted = {key: c for key, c in target.contributions.by_key.items() if key in target.tokens}
    forwards = forwards_of(data, counted)
    if target.relative or not forwards or fits(measured, target.contributions, target.expected):
        return None
    tasks = [list(keys) for keys in zip(*forwards, strict=True)]
    own = own_weights(target, objective, tasks)
    result = OwnMeans(replace(target, expected=own), forwards=forwards)
    lines = " and ".join(dict.fromkeys(line_of(counted[keys[0]].gradient) for keys in tasks))
    told = f"{len(tasks)} losses of one forward pass are differentiated one by one ({lines})"
    numbers = _combined_by(data, target, own, measured, forwards)
    if numbers is not None:
        result.combined = (
            f"{told}, and what runs between there and the optimizer{_read_at(data)} combines their gradients by "
            f"numbers {numbers}: a projection, or weights computed from gradients. What each task "
            "should weigh is not known, nor whether all together are off by a factor. Compare a step in which the "
            "lines between change nothing, or add the losses up for some steps to have the rest judged"
        )
        replaced = [_only_last(held, keys) for held in measured for keys in forwards]
        if all(one is not False for one in replaced) and True in replaced:
            result.combined += (
                ". Nothing but the last loss's gradient is left where all of them reach: if they are meant to be "
                "added up, `param.grad = gradient` has to add instead"
            )
        result.reasons.append(result.combined)
        as_found = {key: Fraction(usual(measured, target.contributions, own, [key])) for key in own}
        result.aim.expected = {key: weight * as_found[key] for key, weight in own.items()}
        return result
    shares = _with_gone([_share(measured, target, own, keys) for keys in tasks], target, tasks)
    if _are_parts(measured, target, shares):
        return None
    alike = all(same(share, shares[0]) for share in shares)
    written = [_documented(measured, target, own, keys) for keys in tasks] if alike else shares
    if _is_known(shares, target, data, forwards) or (alike and _is_known(written, target, data, forwards)):
        reached = reached_by(data, target.contributions)
        labels = [{one.loss.num_labels for key in keys if (one := counted[key]).loss is not None} for keys in forwards]
        if _train_apart(reached, tasks) and all(len(of_forward) == 1 for of_forward in labels):
            result.remarks.append(f"{told}: they are taken for tasks, each a mean over its own tokens (inferred)")
        else:
            result.reasons.append(
                f"{told}, and each is a mean over its own tokens: right where these are tasks of their own, "
                f"{len(tasks)} times too much where they are parts of one batch. {DECLARE}"
            )
        return result
    found = {key: Fraction(share) for keys, share in zip(tasks, shares, strict=True) for key in keys}
    result.aim.expected = {key: weight * found[key] for key, weight in own.items()}
    result.reasons.append(
        f"{told}, and weigh {' and '.join(f'x {share:.4g}' for share in shares)} of a mean over their own tokens: "
        f"whether these are coefficients that are meant or wrong normalisers is not known. {DECLARE}"
    )
    return result


def without_combined(cases: list[Case], means: OwnMeans) -> list[Case]:
    """The cases without those that rest on what tasks weigh which the program combines by numbers of its own: all but
    forward passes of which nothing came, in any task."""
    if not means.combined:
        return cases
    return [case for case in cases if _of_whole_forwards(case, means.forwards)]


def _of_whole_forwards(case: Case, forwards: Forwards) -> bool:
    """Whether some parameter on some rank has nothing of a forward pass, of none of its losses."""
    gone: dict[int, set[ContributionKey]] = defaultdict(set)
    for held, cell in case.cells:
        if not cell.right and abs(cell.ratio) <= max(GONE, cell.tolerance):
            gone[id(held)].add(cell.key)
    return any(of_param.issuperset(keys) for of_param in gone.values() for keys in forwards)


def _combined_by(
    data: StepData,
    target: Aim,
    own: Mapping[ContributionKey, Fraction],
    measured: list[Held],
    forwards: Forwards,
) -> str | None:
    """What is told of the numbers by which a program combines tasks; None where it may add them up.

    Of nearly orthogonal gradients a projection leaves almost all: then every weight is off by less than two numbers
    that somebody wrote are told apart by, and by more than its measurement is uncertain.
    """
    if _apart(data, target.contributions, measured, forwards):
        return "that are not the same for each"
    cells = [cell for held in judge(measured, target.contributions, dict(own)) for cell in held.cells]
    if not cells or any(cell.right or not same(cell.ratio, 1) for cell in cells):
        return None
    return f"next to 1 (x {cells[0].ratio:.5g})"


def _apart(data: StepData, contributions: Contributions, measured: Sequence[Held], forwards: Forwards) -> bool:
    """Whether lines that nobody records multiply the gradients of one forward pass's losses by unlike numbers. By zero
    only where these were handed to the program: what it adds to `.grad` is there, or was emptied."""
    handed_over = {
        (contributions.coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
        for rank, events in data.events.items()
        for event in events
        if isinstance(event, Backward) and event.returned
    }
    return any(_treats_apart(held, keys, handed_over) for held in measured for keys in forwards)


def _share(
    measured: list[Held], target: Aim, own: Mapping[ContributionKey, Fraction], keys: Sequence[ContributionKey]
) -> float:
    """What a task weighs of a mean over its own tokens; 0 where nothing of it is left. Where its passes are means of
    unequal numbers of tokens, what these come to together."""
    judged = judge(measured, target.contributions, dict(own))
    cells = [[cell for cell in held.cells if cell.key in keys] for held in judged]
    if not any(cell.ratio > SAME for of in cells for cell in of):
        return 0.0
    whole = [of for of in cells if {cell.key for cell in of} == set(keys) and all(cell.ratio > GONE for cell in of)]
    if not whole:
        return usual(measured, target.contributions, own, keys)
    best = min(whole, key=lambda of: max(cell.stderr for cell in of))
    parts = [(cell, float(own[cell.key]) * target.tokens[cell.key]) for cell in best]
    means = [cell.ratio * part for cell, part in parts]
    if not all(same(mean, means[0]) for mean in means):
        return usual(measured, target.contributions, own, keys)
    return sum(means) / sum(part for _, part in parts)


def _with_gone(shares: Sequence[float], target: Aim, tasks: Sequence[Sequence[ContributionKey]]) -> list[float]:
    """The same, where a task of which nothing is left (emptied behind each of its passes) weighs beside the others what
    its loss does beside theirs: its coefficient is no second fault."""
    by_key = target.contributions.by_key
    numbers = [(by_key[keys[0]].weight or 0.0) * target.tokens[keys[0]] for keys in tasks]
    there = [share / number for share, number in zip(shares, numbers, strict=True) if share and number]
    return [
        share or (number * there[0] if there else 0.0) or 1.0 for share, number in zip(shares, numbers, strict=True)
    ]


def _are_parts(measured: list[Held], target: Aim, shares: Sequence[float]) -> bool:
    """Whether passes are parts of one mean over all tokens: it is what their weights are but for one number, where each
    loss would have a coefficient of its own, or the losses together make up one mean."""
    if all(same(share * len(shares), 1) for share in shares):
        return True
    judged = judge(measured, target.contributions, target.expected)
    ratios = [cell.ratio for held in judged for cell in held.cells]
    return not all(same(share, shares[0]) for share in shares) and all(same(one, ratios[0]) for one in ratios)


def _treats_apart(held: Held, keys: Sequence[ContributionKey], handed_over: set[ContributionKey]) -> bool:
    if held.observed is None or held.stderr is None or held.nominal is None:
        return False
    for of_rank in _columns(held, keys):
        if len(of_rank) < 2 or not all(held.nominal[of_rank]) or not np.isfinite(held.observed[of_rank]).all():
            continue
        factors = held.observed[of_rank] / held.nominal[of_rank]
        errors = np.abs(held.stderr[of_rank] / held.nominal[of_rank])
        largest = np.abs(factors).max()
        there = np.abs(factors) > GONE * largest
        if not all(there | np.array([held.replay.basis.keys[column] in handed_over for column in of_rank])):
            continue
        if np.ptp(factors) > SAME * largest + 2 * SIGMAS * errors.max():
            return True
    return False


def _only_last(held: Held, keys: Sequence[ContributionKey]) -> bool | None:
    """Whether of all losses of a forward pass the last one differentiated alone is there; None where that is not to be
    seen."""
    found = [] if held.observed is None else [held.observed[of] for of in _columns(held, sorted(keys))]
    whole = [of for of in found if len(of) == len(keys) and np.isfinite(of).all()]
    return all(np.abs(of[:-1]).max() <= GONE * abs(of[-1]) for of in whole) if whole else None


def _columns(held: Held, keys: Sequence[ContributionKey]) -> list[list[int]]:
    """The columns of one forward pass's losses; ranks that share its tokens have one of each."""
    of_key = [[column for column, key in enumerate(held.replay.basis.keys) if key == one] for one in keys]
    present = [columns for columns in of_key if columns]
    return [list(columns) for columns in zip(*present, strict=False)]


def _read_at(data: StepData) -> str:
    lines = [line_of(e) for events in data.events.values() for e in events if isinstance(e, OptimizerStep) and e.site]
    return f" ({lines[0]})" if lines else ""


def _documented(
    measured: list[Held], target: Aim, own: Mapping[ContributionKey, Fraction], keys: Sequence[ContributionKey]
) -> float:
    """The same by what losses weigh and records document: what nobody recorded, a clip by hand, is left to others."""
    judged = judge(measured, target.contributions, dict(own))
    found = [cell.nominal / float(cell.expected) for held in judged for cell in held.cells if cell.key in keys]
    return found[0] if found and all(same(one, found[0]) for one in found) else 0.0


def _is_known(shares: Sequence[float], target: Aim, data: StepData, forwards: Forwards) -> bool:
    """Whether each loss is a mean over its tokens, or all are too large by what no coefficient is: by the loss scale of
    a GradScaler, or, where nothing stands before any, by the number of forward passes, of ranks, or of both."""
    if all(same(share, 1) for share in shares):
        return True
    by_key = target.contributions.by_key
    scales = {event.scale for events in data.events.values() for event in events if isinstance(event, AmpScale)}
    ranks = len({keys[0][0] for keys in forwards})
    for scale in scales or {1.0}:
        bare = all(same((by_key[key].weight or 0.0) * target.tokens[key], scale) for keys in forwards for key in keys)
        degrees = {len(forwards) // ranks, ranks, len(forwards)} - {1} if bare else set()
        sizes = {scale, *degrees, *(scale * degree for degree in degrees)} - {1.0}
        if any(all(same(share, size) for share in shares) for size in sizes):
            return True
    return False


def _train_apart(
    reached: Mapping[ContributionKey, frozenset[ParamKey]], tasks: Sequence[Sequence[ContributionKey]]
) -> bool:
    """Whether each task has parameters that no other one reaches: heads of their own, which parts of a batch share."""
    of_task = [frozenset[ParamKey]().union(*(reached.get(key, ()) for key in keys)) for keys in tasks]
    return all(own - frozenset[ParamKey]().union(*(other for other in of_task if other is not own)) for own in of_task)
