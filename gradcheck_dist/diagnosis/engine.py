"""Diagnosis: from a run folder's traces to a report."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from gradcheck_dist.diagnosis import summary, unread
from gradcheck_dist.diagnosis.aims import Aim, aim, coefficient_unknown, may_be_meant
from gradcheck_dist.diagnosis.alternatives import (
    LOST,
    UNREDUCED,
    skipped_apart,
    training_apart,
    until_apart,
    without_warm_up,
)
from gradcheck_dist.diagnosis.assumed import confirm, divisions
from gradcheck_dist.diagnosis.audit import StepFacts, audit, audited
from gradcheck_dist.diagnosis.case import (
    Case,
    factor_of,
    first_event,
)
from gradcheck_dist.diagnosis.cases import cases_of
from gradcheck_dist.diagnosis.cells import Held, judge, measure
from gradcheck_dist.diagnosis.coefficients import leave_coefficients_open
from gradcheck_dist.diagnosis.conclusion import report_of
from gradcheck_dist.diagnosis.context import step_context
from gradcheck_dist.diagnosis.contradiction import left_open
from gradcheck_dist.diagnosis.effect import effect_of_case
from gradcheck_dist.diagnosis.emptied import frozen, may_be_frozen
from gradcheck_dist.diagnosis.exchanges import faults, makes_up_for
from gradcheck_dist.diagnosis.experiments import between_rivals
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.diagnosis.hand_clip import HandClip, clip_by_hand, freed, scaling_of, settle, tell_hidden, undone
from gradcheck_dist.diagnosis.handmade import name_places, note, weigh
from gradcheck_dist.diagnosis.left_over import say_lost
from gradcheck_dist.diagnosis.norms import step_norms
from gradcheck_dist.diagnosis.open_steps import out_of_sight, passes_unmatched, tokens_known, why_not
from gradcheck_dist.diagnosis.other_steps import (
    conduct_of,
    leave_schedules_open,
    tell_by_other_steps,
    tell_other_counts,
)
from gradcheck_dist.diagnosis.own_parameters import may_be_experts, may_be_own_mean, not_known, own_mean
from gradcheck_dist.diagnosis.rules import all_rules
from gradcheck_dist.diagnosis.sample_means import mean_over_samples
from gradcheck_dist.diagnosis.several_losses import loss_by_loss
from gradcheck_dist.diagnosis.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.terms import judge_terms
from gradcheck_dist.diagnosis.terms_beside import losses_beside
from gradcheck_dist.diagnosis.unfollowed import from_before, moving, not_attached, stepped_together, without_keepers
from gradcheck_dist.diagnosis.verified import left_out, not_summed, not_verified, nothing_verified, verified
from gradcheck_dist.diagnosis.weighted_tokens import leave_weighted_open, spreads_of_losses
from gradcheck_dist.diagnosis.windows import tell_windows
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.ledger.apart import apart, own_coordinates, own_models, told_apart
from gradcheck_dist.ledger.contributions import collect
from gradcheck_dist.ledger.expected import DEFAULT_OBJECTIVE, check_objective
from gradcheck_dist.ledger.leaves import same_tokens
from gradcheck_dist.ledger.looked_at import without_looks
from gradcheck_dist.ledger.lost import lost
from gradcheck_dist.ledger.strangers import strangers
from gradcheck_dist.ledger.tied import told, told_beside
from gradcheck_dist.ledger.tracks import ParamKey, skipped_steps, step_data, steps_of
from gradcheck_dist.ledger.transit import transits
from gradcheck_dist.steps import ranges
from gradcheck_dist.trace.run import Run

UNEXPLAINED = "GS000"
CLIP_BY_HAND = "GS601"
"""Its weights hold a clip that was meant and one that was not: what would have come without the fault is not known."""


def diagnose(run: Run, *, objective: str | None = None, steps: Iterable[int] | None = None) -> Report:
    """Judge a recorded run.

    Args:
        run: as read by trace.run.read_run.
        objective: what a step's gradient is meant to be; None takes what the run declared, else global-token-mean.
        steps: optimizer steps to judge; None takes all that were recorded.

    Raises:
        GradcheckError: E401 unknown objective, E402 none of the steps was recorded.
    """
    chosen, chosen_from = objective_of(run, objective)
    recorded = steps_of(run)
    skipped = skipped_steps(run)
    chosen_steps = recorded if steps is None else [step for step in recorded if step in set(steps)]
    wanted = [step for step in chosen_steps if step not in skipped]
    if recorded and not chosen_steps:
        raise not_recorded(recorded)
    verdicts = [judge_step(run, step, chosen, chosen_from) for step in wanted]
    return conclude(run, verdicts, skipped, chosen, chosen_from)


def not_recorded(recorded: list[int]) -> GradcheckError:
    """The error for steps that nobody recorded."""
    return GradcheckError(
        f"none of the steps asked for was recorded; recorded are {ranges(recorded)}. Name some of these.", code="E402"
    )


def conclude(run: Run, verdicts: list[StepVerdict], skipped: list[int], objective: str, objective_from: str) -> Report:
    """The report of a run whose steps were judged; of `run` only what belongs to no single step is read."""
    notes = [f"step {step}: the GradScaler found an overflow and skipped the optimizer" for step in skipped]
    whole = [verdict for verdict in verdicts if verdict.data.complete or skipped_apart(verdict)]
    say_lost(run, verdicts, whole)
    if whole and len(whole) < len(verdicts):
        # A rank that died leaves a last step that nobody finished; the steps before it stand.
        cut = [verdict.context.step for verdict in verdicts if verdict not in whole]
        notes.append(f"step(s) {ranges(cut)} did not reach the optimizer on every rank and are left out")
        verdicts = whole
    verdicts, behind = until_apart(without_keepers(verdicts))
    verdicts, more = without_warm_up(settle(training_apart(run, verdicts)))
    notes += [*behind, *more]
    weigh(verdicts)
    tell_by_other_steps(verdicts)
    leave_weighted_open(verdicts)
    leave_coefficients_open(verdicts)
    leave_schedules_open(verdicts)
    tell_other_counts(verdicts)
    tell_windows(verdicts)
    confirm(verdicts)
    report = report_of(run, verdicts, objective, objective_from, skipped)
    report.run.skipped_steps = list(skipped)
    report.coverage.notes += [verdict.verified for verdict in verdicts if verdict.verified]
    report.coverage.unverified = [one for verdict in verdicts for one in verdict.unverified]
    report.coverage.problems += [*notes, *dict.fromkeys(remark for verdict in verdicts for remark in verdict.remarks)]
    return report


def objective_of(run: Run, given: str | None) -> tuple[str, str]:
    """What a step's gradient is meant to be, and how that is known."""
    if given is not None:
        return check_objective(given), "given"
    for trace in run.ranks.values():
        if trace.header.objective:
            return check_objective(trace.header.objective), "declared"
    return DEFAULT_OBJECTIVE, "assumed: none was declared; --objective sets it"


@left_open
def judge_step(
    run: Run, step: int, objective: str, objective_from: str, *, drop_lost: bool = False, alone: bool = False
) -> StepVerdict:
    """Judge one optimizer step. `drop_lost`: passes whose gradients were thrown away are taken to be meant so. `alone`:
    ranks that reduce no gradients between them train models of their own."""
    recorded = step_data(run, step)
    data = without_looks(recorded)
    contributions = same_tokens(data, collect(data.events, run.same_data, strangers(data)))
    everyone = own_coordinates(data, contributions)
    models = own_models(data, everyone)
    own = everyone if alone or models else None
    if own is not None:
        data = apart(data, own)
    context = step_context(run, step, data.events, contributions, objective, objective_from)
    verdict = StepVerdict(context, data, contributions, spreads=spreads_of_losses(contributions))
    verdict.lost = lost(run, recorded)
    verdict.reasons += [*([] if verdict.lost else why_not(run, data, contributions)), *nothing_verified(data.events)]
    verdict.reasons += not_summed(data)
    verdict.remarks += [*moving(data), *not_verified(data.events), *contributions.problems]
    beside = functools.partial(losses_beside, contributions, data.events)
    verdict.verified, verdict.unverified = verified(data.events), left_out(data.events)
    verdict.remarks += [told(first, copies) for first, copies in data.tied.items()]
    verdict.remarks += [told_beside(one, other) for one, other in data.beside.items() if one < other]
    # Whole groups are set up so; a rank that is all by itself may as well have been forgotten.
    (verdict.remarks if all(len(ranks) > 1 for ranks in models) else verdict.reasons).extend(told_apart(models))
    if verdict.lost or not tokens_known(run, data) or passes_unmatched(data) or out_of_sight(data):
        verdict.remarks += beside()
        return verdict
    on_the_way = transits(data, contributions)
    context.num_handed_over = len(on_the_way.matched)
    measured = measure(data, contributions, on_the_way)
    if (late := from_before(measured)) is not None:
        verdict.reasons.append(late)
        verdict.remarks += beside()
        return verdict
    means = loss_by_loss(aim(objective, data, contributions, measured, drop_lost=drop_lost), objective, data, measured)
    target, expected = means.aim, means.aim.expected
    context.judged_on(target.contributions)
    verdict.contributions = target.contributions
    context.relative, context.of_means = target.relative, target.of_means
    name_places(measured, data, target.contributions, expected)
    verdict.remarks += [*on_the_way.remarks, *means.remarks, *target.remarks]
    verdict.reasons += [*target.reasons, *means.reasons]
    verdict.held = judge(measured, target.contributions, expected)
    verdict.remarks += beside(verdict.held)
    verdict.reasons += summary.unseen(verdict.held, expected, own)
    verdict.units = summary.unit_of(verdict.held)
    verdict.conduct = conduct_of(data, verdict.held, target.contributions)
    cases = cases_of(verdict, measured, expected, target.tokens)
    norms = step_norms(run, data, contributions.coordinate)
    by_hand = clip_by_hand(cases, data, norms)
    if by_hand is not None:
        of_step = measured
        measured, cases = _without(verdict, of_step, by_hand, target)
        more = undone(cases, by_hand)
        if more is not None:
            by_hand = more
            measured, cases = _without(verdict, of_step, by_hand, target)
        verdict.remarks.append(by_hand.text)
        verdict.reasons += [by_hand.reason] if by_hand.reason else []
        verdict.assumed = by_hand.assumed
    if not cases and verdict.assumed is None:
        verdict.divided = divisions(data, verdict.held, context.quantities)
    verdict.reasons += [*not_attached(data), *(coefficient_unknown(case) for case in cases if may_be_meant(case))]
    cases = [case for case in cases if not may_be_meant(case)]
    verdict.reasons += [not_known(case) for case in cases if may_be_experts(case, data)]
    cases = [case for case in cases if not may_be_experts(case, data)]
    verdict.reasons += [frozen(case) for case in cases if may_be_frozen(case, data)]
    cases = [case for case in cases if not may_be_frozen(case, data)]
    verdict.reasons += [own_mean(case) for case in cases if may_be_own_mean(case, data)]
    cases = [case for case in cases if not may_be_own_mean(case, data)]
    if any(case.culprit.absent for case in cases) and (inside := stepped_together(data)) is not None:
        verdict.reasons.append(inside)
        cases = [case for case in cases if not case.culprit.absent]
    verdict.reasons += [unread.not_known(case, data) for case in cases if unread.may_be_made_up(case, data)]
    cases = [case for case in cases if not unread.may_be_made_up(case, data)]
    made_up = {id(case): reason for case in cases if (reason := makes_up_for(case, data)) is not None}
    verdict.reasons += made_up.values()
    cases = [case for case in cases if id(case) not in made_up]
    if not data.complete:
        # It could still have come, and been made up for, before an optimizer that never came.
        cases = [case for case in cases if not (case.culprit.absent or case.culprit.is_open)]
    hidden = by_hand.hidden if by_hand is not None else [ratio for case in cases for ratio in case.culprit.hidden]
    terms = judge_terms(context, data.events, contributions, expected, cases)
    verdict.reasons += terms.reasons
    verdict.remarks += terms.remarks
    norms_of = (data, norms, verdict.held, target.contributions, expected)
    for case in [*cases, *terms.cases]:
        case.norms = norms
        finding = _finding(case, verdict.units)
        if finding.code == UNEXPLAINED and (samples := mean_over_samples(case, verdict.held, target.tokens)):
            verdict.reasons.append(samples)
            continue
        tell_hidden(case, finding, hidden)
        verdict.scaling = scaling_of(case, data, norms) or verdict.scaling
        known = not case.terms and finding.code != CLIP_BY_HAND
        note(verdict, case, finding, effect_of_case(case, *norms_of) if known else None)
    verdict.weights = summary.weights(
        step, verdict.held, verdict.units, contributions, None if target.relative else expected
    )
    found = frozenset(finding.code for finding in verdict.findings)
    facts = StepFacts(context, data, contributions, norms, verdict.held, found, on_the_way, bool(made_up))
    for one in audit(facts, verdict.units):
        verdict.findings = [finding for finding in verdict.findings if not one.explains(finding)]
        verdict.found(one.finding, one.effect)
    verdict.reasons += faults(data, contributions, facts.weights_right).reasons
    verdict.audited = audited(facts)
    if not drop_lost and LOST in found:
        verdict.without_lost = judge_step(run, step, objective, objective_from, drop_lost=True)
    if own is None and UNREDUCED in found:
        verdict.alone = judge_step(run, step, objective, objective_from, alone=True)
    return verdict


def _without(verdict: StepVerdict, measured: list[Held], clip: HandClip, target: Aim) -> tuple[list[Held], list[Case]]:
    """What was measured, freed of a clip by hand, and what is wrong then."""
    measured = freed(measured, clip)
    verdict.held = judge(measured, target.contributions, target.expected)
    verdict.units = summary.unit_of(verdict.held)
    return measured, cases_of(verdict, measured, target.expected, target.tokens)


def _finding(case: Case, units: dict[ParamKey, str]) -> Finding:
    """Let the rules name a case; GS000 names what no other does."""
    for rule in all_rules():
        answer = rule.judge(case) if hasattr(rule, "judge") else None
        if answer is None:
            continue
        if answer.culprit is not None:
            case.culprit = answer.culprit
        return Finding(
            code=rule.CODE,
            name=rule.NAME,
            severity=answer.severity,
            step=case.context.step,
            factor=answer.factor or factor_of(case),
            pattern=answer.pattern or case.pattern.text,
            units=sorted({units[held.param] for held in case.held}),
            num_parameters=len({held.param for held in case.held}),
            ranks=case.ranks,
            first_event=first_event(case),
            explanation=answer.explanation,
            fix=answer.fix,
            suggested_experiment=between_rivals(case) or answer.suggested_experiment,
            steps=[case.context.step],
        )
    raise AssertionError("GS000 answers every case")
