"""What the trainer's own lines do to gradients: a number that stands in the program, or a function of the data.

Between two recorded events a line of the user's may do anything. A forgotten or wrong constant is a fault. A clip by
parameter, a projection between tasks, a trust ratio, a running mean or a random mask is not: it is meant, and no weight
pattern says otherwise. What tells them apart is where their numbers come from:

* a constant is a number that somebody wrote (0.5, 1/3, three digits at most) or one made of degrees and counts
  (1/num_tokens), and it is there again in the next step: on the same parameters, or with the same name;
* what is computed from gradients takes other values on other parameters and in other steps, and none of them is round.

So several values in one step that nobody would write, values that change from step to step without a name, and factors
whose parameters are no combination of the contributions in the next step (a running mean) accuse nobody: the verdict
stays open and names the lines. A factor between parameters that stays (`x 0.5` on the experts, beside a clip of all)
is a constant all the same. Copies of one parameter that are scaled apart on different ranks drift apart, whatever meant
it: that stays a finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import log
from zlib import crc32

from gradcheck_dist.diagnosis.causes.account import account
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.vocabulary import CLIP_COEFFICIENT
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.norms.effect import Effect
from gradcheck_dist.diagnosis.open_cases.own_rates import are_rates
from gradcheck_dist.diagnosis.rules import gs000_unexplained_scale as unexplained
from gradcheck_dist.diagnosis.rules import gs202_scaled_in_flight as in_flight
from gradcheck_dist.diagnosis.rules import gs501_clip_by_hand as scaled_alike
from gradcheck_dist.diagnosis.rules import gs605_early_clip as early_clip
from gradcheck_dist.diagnosis.steps.changed_in import NO_COMBINATION, place_in_words, short_line
from gradcheck_dist.diagnosis.steps.param_clips import is_last
from gradcheck_dist.diagnosis.steps.pass_counts import PER_PASS, of_pass
from gradcheck_dist.diagnosis.steps.scaled_apart import copies_part, factor_of, replicas_part
from gradcheck_dist.diagnosis.steps.step_verdict import Change, Key, StepVerdict, cause
from gradcheck_dist.diagnosis.steps.undone_behind import leave_undone_open
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.diagnosis.weights.written import SIMPLE, VAGUE, Measured, distinct, is_exactly_written, is_written
from gradcheck_dist.events import Reduce
from gradcheck_dist.wording import numbered, plural

MAX_KEPT = 256
"""Factors that are kept of a change, to be compared with other steps'."""
OFTEN = 3
"""Steps in which a single parameter's factor must be the same to be a constant, where others' change."""
BLURRED = 0.05
"""Relative tolerance of a factor."""


def note(verdict: StepVerdict, case: Case, finding: Finding, effect: Effect | None) -> None:
    """Keep the finding of a case; one that accuses lines of the user's only where this step shows that they are wrong,
    else it waits for the other steps (`weigh`)."""
    change = _change_of(verdict, case, finding, effect)
    if change is not None:
        if _blurred(verdict, case, change):
            return  # a reason says what these lines do
        verdict.changes.append(change)
    if change is None or change.firm:
        verdict.found(finding, effect)


def _blurred(verdict: StepVerdict, case: Case, change: Change) -> bool:
    """Whether the same lines change other gradients by more than a factor, and what they are said to do to these is
    known so roughly that it may be no factor either: what is added to a gradient looks like one in a few samples."""
    return case.pattern.tolerance > BLURRED and _mixes(verdict, change)


def _mixes(verdict: StepVerdict, change: Change) -> bool:
    """Whether the same lines change other gradients of the step by more than a factor: a random mask leaves a few of
    them whole, and multiplies these by a number that somebody wrote."""
    return any(change.words in held.changed_in for held in verdict.held if held.changed_in)


def _change_of(verdict: StepVerdict, case: Case, finding: Finding, effect: Effect | None) -> Change | None:
    """The change that a finding accuses, when it is one that no recorded event made; None for all others."""
    if finding.code not in (unexplained.CODE, scaled_alike.CODE, in_flight.CODE) or not _by_hand(case):
        return None
    factors: dict[Key, Measured] = {(held.param, held.rank, cell.key): factor_of(cell) for held, cell in case.cells}
    kept = sorted(factors, key=lambda key: crc32(repr(key).encode()))[:MAX_KEPT]  # the same ones in every step
    culprit = case.culprit
    event, before = culprit.event, culprit.before
    or_loss, makes_up = culprit.kind == "loss", unexplained.makes_up(culprit, case.pattern)
    # Where the weights were right before it, a number may follow a schedule.
    written = makes_up and culprit.write is not None and is_exactly_written(culprit.write.factor)
    parted = replicas_part(case) or copies_part(case, verdict)
    if parted:
        finding.explanation += " One gradient is scaled by other factors on other ranks: what they hold drifts apart."
    # What is multiplied alike elsewhere, and right so, was to be multiplied here, by whatever number of each step.
    spared = culprit.spared is not None and case.pattern.kind == "uniform"
    spared &= all(held.clip_by_hand == 1 for held in case.held)
    stands, recorded = spared or _stands_written(case), _recorded(verdict, case)
    return Change(
        place=(*culprit.start, before is not None and before.__struct_config__.tag, short_line(before)),
        words=place_in_words(culprit.kind, short_line(event), before),
        finding=finding,
        effect=effect,
        factors={key: factors[key] for key in kept},
        num_parameters=len({held.param for held in case.held}),
        name=None if or_loss else of_pass(case) or _name(case),
        counted=None if or_loss or not case.names else case.names[0].expression,
        firm=or_loss or finding.code == scaled_alike.CODE or parted or written or stands,
        parted=parted,
        makes_up=makes_up,
        uniform=case.pattern.kind == "uniform",
        factor=culprit.factor,
        written=written,
        or_loss=or_loss,
        stands=stands,
        spared=spared,
        recorded=recorded,
        rates=not (parted or spared or or_loss or abs(recorded - 1) > VAGUE)
        and are_rates(case, verdict.held, makes_up=makes_up),
    )


def _recorded(verdict: StepVerdict, case: Case) -> float:
    """What a few of the best known weights are off by besides what the last lines before the optimizer did to them, by
    what was measured there; 1 where that is not the same."""
    if case.pattern.kind == "uniform" or not is_last(case):
        return 1.0
    best = sorted((pair for pair in case.cells if pair[1].ratio), key=lambda pair: pair[1].tolerance)[:OFTEN]
    before = type(case.culprit.before)
    known = [(cell.ratio, account(verdict.data, held, cell).gaps) for held, cell in best]
    gaps = [(ratio, [gap for gap in of_cell if isinstance(gap.end, before)][-1:]) for ratio, of_cell in known]
    found = distinct([(ratio / last.factor, VAGUE) for ratio, of in gaps for last in of if last.factor])
    return found[0][0] if len(found) == 1 else 1.0


def weigh(verdicts: Sequence[StepVerdict]) -> None:
    """Decide over all steps which changes are constants: these are findings, the others reasons for an open verdict."""
    groups: dict[tuple[object, ...], list[tuple[StepVerdict, Change]]] = defaultdict(list)
    for verdict in verdicts:
        _leave_to_clips(verdict)
        known = {id(finding) for finding in verdict.findings}
        for change in verdict.changes:
            if not change.firm or id(change.finding) in known:  # else: taken for a clip meanwhile
                groups[change.place].append((verdict, change))
    meant: list[list[tuple[StepVerdict, Change]]] = []
    for members in groups.values():
        constant = _is_constant(members, verdicts)
        rates = constant and all(change.rates for _, change in members)
        for verdict, change in members:
            listed = any(finding is change.finding for finding in verdict.findings)
            if rates:
                verdict.take_away(change.finding)
            elif constant and not listed:
                if change.name != PER_PASS:
                    change.finding.explanation += f" It is the same in {len(members)} steps: a constant."
                verdict.found(change.finding, change.effect)
            elif listed and not constant:
                verdict.findings = [finding for finding in verdict.findings if finding is not change.finding]
                verdict.effects.pop(cause(change.finding), None)
        if rates:
            members[0][0].reasons.append(_of_rates(members[0][1]))
        if not constant:
            meant.append(members)
    for members in meant:
        members[0][0].reasons.append(_reason(members))
        leave_undone_open(members)


def _leave_to_clips(verdict: StepVerdict) -> None:
    """Forget changes that are a recorded clip's own doing, where clips are told to have come too early."""
    if all(finding.code != early_clip.CODE for finding in verdict.findings):
        return
    told = [change for change in verdict.changes if change.name == CLIP_COEFFICIENT]
    for change in told:
        verdict.changes.remove(change)
        verdict.take_away(change.finding)


def _by_hand(case: Case) -> bool:
    """Whether a line of the user's made the change: between two recorded events, in a hook on a parameter, or in a
    communication hook whose arithmetic nobody documents."""
    culprit, event = case.culprit, case.culprit.event
    if culprit.absent or event is None or culprit.factor is None:
        return False
    if culprit.kind == "loss":
        return culprit.unrecorded and culprit.before is not None  # or the loss is wrong: `Change.or_loss`
    if culprit.unrecorded or culprit.kind == "backward":
        return True
    return isinstance(event, Reduce) and culprit.nominal is None


def _stands_written(case: Case) -> bool:
    """Whether one step alone shows numbers of the program and not of the data."""
    pattern = case.pattern
    if pattern.kind not in ("uniform", "geometric", "repeated", "part", "other"):
        return True  # follows counts, or who holds it
    if pattern.kind in ("geometric", "repeated") and pattern.base is not None:
        values = [(value, pattern.tolerance) for value in (pattern.base, pattern.factor)]
        if len({cell.key[1:] for _, cell in case.cells}) >= OFTEN:
            return True  # two values lie on some power law, three do not
    else:
        values = distinct([factor_of(cell) for _, cell in case.cells if not cell.right])
        measured = case.culprit.factor
        if (
            measured
            and unexplained.makes_up(case.culprit, pattern)
            and any(
                is_written(number, pattern.tolerance, case.context.quantities) for number in (measured, 1 / measured)
            )
        ):
            return True
    if len(values) == 1 and values[0][1] > VAGUE:
        return True
    return all(value == 0 or is_written(value, tolerance, case.context.quantities) for value, tolerance in values)


def _name(case: Case) -> str | None:
    """What the factor is called; None when it is only a number."""
    if case.pattern.kind in ("objective", "power", "partial"):
        return f"{case.pattern.kind} {case.pattern.objective} {case.pattern.count}"
    names = case.base_names if case.pattern.base is not None else case.names
    return names[0].expression if names and names[0].powers and names[0].cost < SIMPLE else None


def _is_constant(members: list[tuple[StepVerdict, Change]], verdicts: Sequence[StepVerdict]) -> bool:
    if any(change.parted for _, change in members) or all(change.spared for _, change in members):
        return True
    if any(change.or_loss and not change.stands and verdict.kept_apart is not None for verdict, change in members):
        return False  # the program puts passes together itself
    if any(change.or_loss for _, change in members):
        series, lost = _series(members, verdicts)
        return lost <= len(series) // 2  # a loss's number may follow its tokens
    alone = not any(_mixes(verdict, change) for verdict, change in members)
    if (alone and all(change.written for _, change in members)) or _is_one_number(members):
        return True
    series, lost = _series(members, verdicts)
    several = {key: of_key for key, of_key in series.items() if len(of_key) > 1}
    if lost > len(series) // 2:
        return False  # in the next step it is no factor any more
    zeros = [key for key, of_key in series.items() if any(value == 0 for value, _ in of_key.values())]
    if zeros and any(_mixed(verdict) for verdict, _ in members):
        # Beside gradients that are no combination any more a zero is one more value of whatever changed them.
        series = {key: of_key for key, of_key in series.items() if key not in zeros}
        several = {key: of_key for key, of_key in several.items() if key not in zeros}
        if not series:
            return False
    if not several:
        return alone and all(change.firm for _, change in members)
    lasting = {key for key, of_key in several.items() if _lasts(of_key)}
    if len(lasting) == len(several):
        # Known roughly, clips of gradients that hardly change look lasting too: but as many values as parameters.
        values = distinct([factor for of_key in several.values() for factor in of_key.values()])
        return len(values) == 1 or all(map(_tight, several.values())) or all(change.firm for _, change in members)
    if any(len(several[key]) >= OFTEN and _tight(several[key]) for key in lasting):
        return True
    names = {change.name for _, change in members}
    if len(names) == 1 and None not in names:
        return True
    if _follows_counts(members):
        return True
    if all(change.firm for _, change in members) and _in_some_steps(several):
        return True
    return _lasts_beside_others(several)


def _is_one_number(members: list[tuple[StepVerdict, Change]]) -> bool:
    """Whether the lines multiply by the same number in several steps, whatever the weights before them were off by."""
    if not any(change.makes_up for _, change in members):
        return False
    known = [(change.factor, change.finding.factor.tolerance or 0.0) for _, change in members]
    numbers = [(factor, tolerance) for factor, tolerance in known if factor and tolerance <= VAGUE]
    steps = {verdict.context.step for verdict, _ in members}
    return len(steps) > 1 and len(numbers) == len(members) and len(distinct(numbers)) == 1


def _follows_counts(members: list[tuple[StepVerdict, Change]]) -> bool:
    """Whether all weights are off by what the same counts and degrees make, in several steps in which that is another
    number each: chance makes one of them, and nothing that is computed from gradients makes them all."""
    counted = {change.counted for _, change in members}
    values = distinct([(change.finding.factor.observed or 0.0, VAGUE) for _, change in members])
    return len(counted) == 1 and None not in counted and len(values) >= OFTEN and all(one.uniform for _, one in members)


def _series(
    members: list[tuple[StepVerdict, Change]], verdicts: Sequence[StepVerdict]
) -> tuple[dict[Key, dict[int, Measured]], int]:
    """The factors of each weight by step, 1 where it came out right; and how many are no factor in another step, unless
    they are the same in several, and it is not said that these lines made them none."""
    series: dict[Key, dict[int, Measured]] = defaultdict(dict)
    for verdict, change in members:
        for key, factor in change.factors.items():
            series[key][verdict.context.step] = factor
    lost: set[Key] = set()
    here: set[Key] = set()
    words = {change.words for _, change in members}
    of_step = {verdict.context.step: change for verdict, change in members}
    for verdict in verdicts:
        step = verdict.context.step
        holders = {(held.param, rank): held for held in verdict.held for rank in held.ranks}
        for key, of_key in series.items():
            held = holders.get(key[:2])
            if held is None or step in of_key or key[2] not in verdict.contributions.by_key:
                continue
            if NO_COMBINATION in held.reason:
                lost.add(key)
                here |= {key} if any(one in held.changed_in for one in words) else set()
            elif held.cells and not (step in of_step and len(of_step[step].factors) >= MAX_KEPT):
                of_key[step] = (1.0, held.cells[0].tolerance)
    lost -= {key for key in lost - here if len(series[key]) > 1 and _lasts(series[key])}
    return {key: of_key for key, of_key in series.items() if any(f != 1 for f, _ in of_key.values())}, len(lost)


def _mixed(verdict: StepVerdict) -> bool:
    return any(NO_COMBINATION in held.reason for held in verdict.held)


def _lasts(of_key: Mapping[int, Measured]) -> bool:
    return len(distinct(list(of_key.values()))) == 1


def _tight(of_key: Mapping[int, Measured]) -> bool:
    return all(tolerance <= VAGUE for _, tolerance in of_key.values())


def _in_some_steps(several: Mapping[Key, Mapping[int, Measured]]) -> bool:
    """Whether a number is there in some steps and nothing in the others: the last window of an epoch, a branch."""
    return all(
        len(distinct([factor for factor in of_key.values() if factor[0] != 1])) == 1
        and all(value != 0 for value, _ in of_key.values())
        for of_key in several.values()
    )


def _lasts_beside_others(several: Mapping[Key, Mapping[int, Measured]]) -> bool:
    """Whether weights keep a factor between them that is not 1, while all change together (a clip of the whole)."""
    steps = set.intersection(*(set(of_key) for of_key in several.values()))
    if len(steps) < 2 or len(several) < 2 or not all(map(_tight, several.values())):
        return False
    first, *others = several.values()
    if any(of_key[step][0] <= 0 for of_key in several.values() for step in steps):
        return False
    apart = False
    for of_key in others:
        tolerance = 4 * max(of_key[step][1] + first[step][1] for step in steps)
        shifts = [log(of_key[step][0] / first[step][0]) for step in steps]
        if max(shifts) - min(shifts) > tolerance:
            return False
        apart |= abs(shifts[0]) > 2 * tolerance
    return apart


def _of_rates(change: Change) -> str:
    until = "All others come out right" if change.makes_up else "Up to there the weights are right"
    return (
        f"{change.words} multiplies the gradients of {plural(change.num_parameters, 'parameter')} "
        f"({_size(change)}), by one number each in all passes and on all ranks: lines that give layers rates of their "
        f"own do this, and no degree or count makes these numbers. Whether it is meant is not known. {until}"
    )


def _size(*changes: Change) -> str:
    """By which numbers, in words."""
    values = [factor for each in changes for factor, _ in each.factors.values() if factor != 1] or [1.0]
    low, high = min(values), max(values)
    return f"x {low:.4g}" if high - low <= VAGUE * abs(high) else f"x {low:.4g} to x {high:.4g}"


def _reason(members: list[tuple[StepVerdict, Change]]) -> str:
    steps = [verdict.context.step for verdict, _ in members]
    change = members[0][1]
    params = max(each.num_parameters for _, each in members)
    size = _size(*(each for _, each in members))
    shorten = all(factor <= 1 for _, each in members for factor, _ in each.factors.values())
    alone = not change.makes_up and not any(
        finding.severity != "info" for verdict, _ in members for finding in verdict.findings
    )
    until = "Up to there the weights are right" if alone else "What is wrong besides is told apart from it"
    if abs(change.recorded - 1) > VAGUE:
        named = name_number(change.recorded, members[0][0].context.quantities, VAGUE, max_factors=1)
        name = f" = {named[0].expression}" if named and named[0].powers else ""
        until = (
            f"Up to there all weights are x {change.recorded:.4g}{name}: they are wrong by that unless these lines "
            "divide by it as well"
        )
    elif change.makes_up:
        until = "Up to there the weights are off, so it may be a normalisation by another number than the right one"
    if len(steps) > 1 and shorten and not change.makes_up and all(each.uniform for _, each in members):
        return (
            f"{change.words} multiplies all gradients of a step by one number, another in each ({size}, "
            f"{numbered('step', steps)}): a clip by a norm that is not theirs does this (one that leaves some out, or "
            f"counts some again), or a normalisation; a forgotten constant does not. Whether it is meant is not known. "
            f"{until}"
        )
    return (
        f"{change.words} changes gradients by no fixed factor ({size} on {plural(params, 'parameter')}, "
        f"{numbered('step', steps)}): a clip by parameter, a projection, a normalisation or a running "
        f"mean does this, a forgotten constant does not. Whether it is meant is not known. {until}"
    )
