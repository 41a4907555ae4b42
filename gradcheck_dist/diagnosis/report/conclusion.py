"""What all judged steps come to: the report of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from gradcheck_dist import __version__
from gradcheck_dist.diagnosis.finding import Report, RuleOutcomes, Tool, Verdict
from gradcheck_dist.diagnosis.report.coverage import coverage as covered
from gradcheck_dist.diagnosis.report.coverage import gaps
from gradcheck_dist.diagnosis.report.next_step import ALL_SKIPPED, NOT_EMPTIED, next_step
from gradcheck_dist.diagnosis.report.run_info import metrics, overhead, run_info
from gradcheck_dist.diagnosis.rules import all_rules
from gradcheck_dist.diagnosis.steps.open_steps import BLIND, no_step
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, merged, recorded_norms
from gradcheck_dist.diagnosis.steps.units import unit_list
from gradcheck_dist.events import AmpUnscale
from gradcheck_dist.ledger.apart import trained_later
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import numbered


def report_of(
    run: Run,
    verdicts: list[StepVerdict],
    objective: str,
    objective_from: str,
    skipped: Sequence[int],
    blind: Sequence[int],
) -> Report:
    """One finding a cause, what was covered and how it was compared; of `run` only what belongs to no single step."""
    findings = merged(verdicts)
    references = frozenset[ParamKey]().union(*(verdict.references for verdict in verdicts))
    coverage = covered(run, [verdict.held for verdict in verdicts], references)
    reasons = list(dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons))
    reasons += gaps([(verdict.context.step, verdict.held) for verdict in verdicts])
    reasons += [*_left_by_overflow(run), *dict.fromkeys(chain.from_iterable(trained_later(run).values()))]
    unseen = [step for step in blind if verdicts and step > verdicts[0].context.step]
    if unseen:
        reasons.append(f"{numbered('step', unseen)}: {BLIND}")
    if verdicts and len(unseen) < len(blind):  # parameters may not have been known before the first step that was seen
        coverage.notes.append(f"{numbered('step', [step for step in blind if step not in unseen])}: {BLIND}")
    if not verdicts and skipped:
        reasons.append(f"the GradScaler found an overflow in {numbered('step', skipped)}: {ALL_SKIPPED}")
    elif not verdicts:
        reasons.append(f"{numbered('step', blind)}: {BLIND}" if blind else no_step(run, coverage))
    judged = any(held.cells for verdict in verdicts for held in verdict.held)
    accused = any(finding.severity != "info" for finding in findings)
    state: Verdict = "findings" if accused else "clean" if judged and not reasons else "undetermined"
    contexts = [verdict.context for verdict in verdicts]
    contributions = [(verdict.context.step, verdict.contributions) for verdict in verdicts]
    series = metrics(run, contributions, recorded_norms(verdicts))
    failed = sorted({finding.code for finding in findings})
    by_weights = [rule for rule in all_rules() if judged and hasattr(rule, "triggered")]
    triggered = {rule.CODE for rule in by_weights for context in contexts if rule.triggered(context)}
    triggered |= {code for verdict in verdicts for code in verdict.audited}
    report = Report(
        tool=Tool(version=__version__),
        run=run_info(run, contexts, objective, objective_from),
        verdict=state,
        reasons=reasons,
        findings=findings,
        rules=RuleOutcomes(
            failed=failed,
            passed=sorted(triggered - set(failed)),
            not_triggered=sorted({rule.CODE for rule in all_rules()} - triggered - set(failed)),
        ),
        coverage=coverage,
        units=unit_list([verdict.units for verdict in verdicts]),
        weights=[weight for verdict in verdicts for weight in verdict.weights],
        overhead=overhead(run),
        metrics={name: [value for _, value in pairs] for name, pairs in series.items()},
        metric_steps={name: [step for step, _ in pairs] for name, pairs in series.items()},
        tolerance=max(
            (cell.tolerance for verdict in verdicts for held in verdict.held for cell in held.cells), default=None
        ),
    )
    report.next_step = next_step(report)
    return report


def _left_by_overflow(run: Run) -> list[str]:
    """Why no later step can come right: gradients that overflowed are added to."""
    unscaled = (event for trace in run.ranks.values() for event in trace.events if isinstance(event, AmpUnscale))
    steps = sorted({event.step for event in unscaled if event.kept and event.found_inf})
    if not steps:
        return []
    return [
        f"in {numbered('step', steps)} backward added to gradients that had overflowed in an earlier step, and no such "
        f"step can come right: {NOT_EMPTIED}"
    ]
