"""Diagnosis: from a run folder's traces to a report."""

from __future__ import annotations

from collections.abc import Container, Sequence

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.judged_alone import judge_alone
from gradcheck_dist.diagnosis.losses.coefficients import leave_coefficients_open
from gradcheck_dist.diagnosis.losses.inferred_terms import tell_terms
from gradcheck_dist.diagnosis.losses.loud_ranks import leave_loud_open
from gradcheck_dist.diagnosis.losses.samples import with_lengths
from gradcheck_dist.diagnosis.losses.terms_apart import leave_terms_open
from gradcheck_dist.diagnosis.losses.weighted_tokens import leave_weighted_open
from gradcheck_dist.diagnosis.norms.assumed import confirm
from gradcheck_dist.diagnosis.report.conclusion import report_of
from gradcheck_dist.diagnosis.steps.alternatives import (
    leave_shares_open,
    skipped_apart,
    training_apart,
    until_apart,
    with_one_batch,
    without_warm_up,
)
from gradcheck_dist.diagnosis.steps.averaged_beside import leave_averaged_open
from gradcheck_dist.diagnosis.steps.changed_in import NO_COMBINATION
from gradcheck_dist.diagnosis.steps.computed_behind import leave_computed_open
from gradcheck_dist.diagnosis.steps.drift import leave_drift, leave_drift_between_open, leave_own_parts_open
from gradcheck_dist.diagnosis.steps.earlier_gradients import tell_earlier_gradients
from gradcheck_dist.diagnosis.steps.fixed_lengths import leave_fixed_lengths_open
from gradcheck_dist.diagnosis.steps.hand_clip import settle
from gradcheck_dist.diagnosis.steps.handmade import weigh
from gradcheck_dist.diagnosis.steps.kept_apart import leave_tasks_open
from gradcheck_dist.diagnosis.steps.left_over import say_lost
from gradcheck_dist.diagnosis.steps.named_steps import name_steps, words_of_steps
from gradcheck_dist.diagnosis.steps.never_read import leave_unread_open
from gradcheck_dist.diagnosis.steps.one_law import tell_one_law
from gradcheck_dist.diagnosis.steps.open_steps import leave_unmade_open
from gradcheck_dist.diagnosis.steps.other_steps import (
    leave_empty_open,
    tell_by_other_steps,
    tell_other_counts,
)
from gradcheck_dist.diagnosis.steps.own_divisors import leave_statistics_open
from gradcheck_dist.diagnosis.steps.pass_counts import lay_to_passes
from gradcheck_dist.diagnosis.steps.schedules import leave_schedules_open
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.steps.thrown_away import leave_thrown_away_open
from gradcheck_dist.diagnosis.steps.turns import tell_turns
from gradcheck_dist.diagnosis.steps.uncounted_beside import tell_uncounted
from gradcheck_dist.diagnosis.steps.undone_behind import leave_assumed_open, leave_clipped_by_rank_open
from gradcheck_dist.diagnosis.steps.unfollowed import without_keepers
from gradcheck_dist.diagnosis.steps.unrecorded import passes_of, tell_unlike, tell_unusual
from gradcheck_dist.diagnosis.steps.waiting import name_waiting
from gradcheck_dist.diagnosis.steps.windows import tell_windows
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.ledger.tracks import blind_steps, skipped_steps, steps_of
from gradcheck_dist.objectives import DEFAULT_OBJECTIVE, check_objective
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import numbered


def diagnose(run: Run, *, objective: str | None = None, steps: Container[int] | None = None) -> Report:
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
    chosen_steps = recorded if steps is None else [step for step in recorded if step in steps]
    wanted = [step for step in chosen_steps if step not in skipped]
    if recorded and not chosen_steps:
        raise not_recorded(recorded)
    verdicts = [judge_alone(run, step, chosen, chosen_from) for step in wanted]
    blind = [step for step in blind_steps(run) if steps is None or step in steps]
    return conclude(run, verdicts, skipped, chosen, chosen_from, blind)


def not_recorded(recorded: list[int]) -> GradcheckError:
    """The error for steps that nobody recorded."""
    return GradcheckError(
        f"none of the steps asked for was recorded; recorded: {numbered('step', recorded)}. Name some of these.",
        code="E402",
    )


def conclude(
    run: Run,
    verdicts: list[StepVerdict],
    skipped: list[int],
    objective: str,
    objective_from: str,
    blind: Sequence[int] = (),
) -> Report:
    """The report of a run whose steps were judged; of `run` only what belongs to no single step is read."""
    notes = [f"step {step}: the GradScaler found an overflow and skipped the optimizer" for step in skipped]
    problems = []
    of_steps = words_of_steps(verdicts)
    whole = [verdict for verdict in verdicts if verdict.data.complete or skipped_apart(verdict)]
    say_lost(run, verdicts, whole)
    if whole and len(whole) < len(verdicts):
        # A rank that died leaves a last step that nobody finished; the steps before it stand.
        cut = [verdict.context.step for verdict in verdicts if verdict not in whole]
        problems.append(f"of {numbered('step', cut)} not every rank recorded an optimizer step: left out")
        verdicts = whole
    verdicts, behind = until_apart(without_keepers(with_one_batch(verdicts)))
    leave_shares_open(verdicts)
    verdicts, more = without_warm_up(settle(training_apart(run, verdicts)))
    verdicts = leave_thrown_away_open(verdicts)
    notes += more
    problems += behind
    leave_unmade_open(verdicts)
    leave_unread_open(verdicts)
    name_waiting([(one.context.step, one.unread, one.held) for one in verdicts], NO_COMBINATION)
    tell_earlier_gradients(verdicts)
    tell_terms(verdicts)
    leave_own_parts_open(verdicts)
    leave_averaged_open(verdicts)
    leave_drift(verdicts)
    weigh(verdicts)
    leave_tasks_open(verdicts)
    lay_to_passes(verdicts)
    tell_by_other_steps(verdicts)
    leave_weighted_open(verdicts)
    leave_loud_open(verdicts)
    leave_coefficients_open(verdicts)
    leave_terms_open(verdicts)
    leave_schedules_open(verdicts)
    leave_computed_open(verdicts)
    leave_statistics_open(verdicts)
    leave_empty_open(verdicts)
    tell_other_counts(verdicts)
    leave_fixed_lengths_open(verdicts)
    tell_windows(verdicts)
    tell_one_law(verdicts)
    passes = passes_of(run, verdicts)
    tell_unusual(verdicts, passes)
    confirm(verdicts)
    leave_assumed_open(verdicts)
    leave_clipped_by_rank_open(verdicts)
    tell_uncounted(verdicts)
    leave_drift_between_open(run, verdicts)
    if len(inferred := {(one.context.objective, one.context.objective_from) for one in verdicts}) == 1:
        objective, objective_from = inferred.pop()  # the weights of all steps tell what is meant
        objective_from = with_lengths(objective_from, [one.contributions for one in verdicts])
    name_steps(verdicts, of_steps)
    report = report_of(run, verdicts, objective, objective_from, skipped, blind)
    report.run.skipped_steps = list(skipped)
    report.coverage.notes += [verdict.verified for verdict in verdicts if verdict.verified]
    unlike = [*tell_unlike(passes), *tell_turns(verdicts)]
    report.coverage.notes += unlike
    if unlike and report.verdict == "clean":
        report.next_step = f"Nothing to mend in these steps. But record another one as well: {unlike[0]}."
    report.coverage.unverified = [one for verdict in verdicts for one in verdict.unverified]
    report.coverage.problems += problems
    report.coverage.notes += [*notes, *dict.fromkeys(remark for verdict in verdicts for remark in verdict.remarks)]
    return report


def objective_of(run: Run, given: str | None) -> tuple[str, str]:
    """What a step's gradient is meant to be, and how that is known."""
    if given is not None:
        return check_objective(given), "given"
    for trace in run.ranks.values():
        if trace.header.objective:
            return check_objective(trace.header.objective), "declared"
    return DEFAULT_OBJECTIVE, "assumed: none was declared; --objective sets it"
