"""The judgement of one optimizer step: from what was recorded of it to a verdict.

A step is read and weighed (observed beside expected), wrong weights are given to whoever is to blame, what may be meant
is left open, and the rules name the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gradcheck_dist.diagnosis.audit import Audited, audit, audited
from gradcheck_dist.diagnosis.audits.attention import open_attention
from gradcheck_dist.diagnosis.audits.exchanges import faults, makes_up_for
from gradcheck_dist.diagnosis.audits.facts import StepFacts
from gradcheck_dist.diagnosis.audits.labels import open_labels
from gradcheck_dist.diagnosis.audits.swapped_copies import copies_are_made_up_for, counted_for_each_copy
from gradcheck_dist.diagnosis.audits.unequal_losses import unequal_losses, unequal_weights
from gradcheck_dist.diagnosis.audits.vocabulary import no_distribution
from gradcheck_dist.diagnosis.audits.whole_gradients import leave_whole_open, whole_for_each, whole_is_counted_once
from gradcheck_dist.diagnosis.audits.whole_losses import part_of_one_loss, share_is_made_up_for, shares_of_one_loss
from gradcheck_dist.diagnosis.causes.case import Case, factor_of, first_event
from gradcheck_dist.diagnosis.causes.experiments import between_rivals
from gradcheck_dist.diagnosis.causes.loss_lines import in_words, loss_lines, mended
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.losses import samples
from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.one_batch import may_be_one_batch
from gradcheck_dist.diagnosis.losses.repeated import weighing_or_gone
from gradcheck_dist.diagnosis.losses.returned import perhaps_gone
from gradcheck_dist.diagnosis.losses.tasks import without_combined
from gradcheck_dist.diagnosis.losses.terms import judge_terms
from gradcheck_dist.diagnosis.losses.terms_apart import term_weights
from gradcheck_dist.diagnosis.losses.terms_beside import losses_beside
from gradcheck_dist.diagnosis.losses.weighted_tokens import adds_up_apart
from gradcheck_dist.diagnosis.losses.written import as_written
from gradcheck_dist.diagnosis.norms.assumed import divisions
from gradcheck_dist.diagnosis.norms.effect import effect_of_case
from gradcheck_dist.diagnosis.norms.hand_norms import HandNorm, freed_by_rank, wrong_norm
from gradcheck_dist.diagnosis.norms.scaled_clips import ScaledClip, scaled_clip
from gradcheck_dist.diagnosis.norms.step_norms import StepNorms, step_norms
from gradcheck_dist.diagnosis.open_cases.arrived_twice import arrived_twice
from gradcheck_dist.diagnosis.open_cases.givers import only_others_gave
from gradcheck_dist.diagnosis.open_cases.own_shards import leave_shards_open
from gradcheck_dist.diagnosis.open_cases.pardons import leave_open
from gradcheck_dist.diagnosis.open_cases.sample_means import mean_over_samples
from gradcheck_dist.diagnosis.open_cases.stepped_again import stepped_again
from gradcheck_dist.diagnosis.open_cases.uncounted import without_uncounted
from gradcheck_dist.diagnosis.open_cases.unread import begun_alike, parts_handed_on
from gradcheck_dist.diagnosis.rules import all_rules
from gradcheck_dist.diagnosis.steps.alternatives import LOST, UNREDUCED
from gradcheck_dist.diagnosis.steps.cases import cases_of, configured_at
from gradcheck_dist.diagnosis.steps.clip_lines import clip_of_line
from gradcheck_dist.diagnosis.steps.contradiction import left_open
from gradcheck_dist.diagnosis.steps.hand_clip import (
    HandClip,
    clip_by_hand,
    clip_of_most,
    freed,
    scaling_of,
    tell_hidden,
    undone,
)
from gradcheck_dist.diagnosis.steps.handmade import note
from gradcheck_dist.diagnosis.steps.kept_apart import kept_apart
from gradcheck_dist.diagnosis.steps.open_steps import (
    not_finite,
    weighed_apart,
)
from gradcheck_dist.diagnosis.steps.param_clips import freed_of_params, is_last, of_params
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.diagnosis.steps.thrown_away import thrown_away
from gradcheck_dist.diagnosis.steps.uncounted_beside import uncounted
from gradcheck_dist.diagnosis.steps.unfollowed import not_attached
from gradcheck_dist.diagnosis.steps.units import parted, unit_of, weights
from gradcheck_dist.diagnosis.weighing import Assumed, Measurements, Reading, Weighed, read_step, weigh
from gradcheck_dist.diagnosis.weights.cells import Held, judge
from gradcheck_dist.diagnosis.weights.few_elements import unlike_reads
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.evaluated import told_evaluated
from gradcheck_dist.ledger.handed_on import changed_on_the_way, hands_on
from gradcheck_dist.ledger.hooked import told_hooks
from gradcheck_dist.ledger.largest import filled_up, told_picked
from gradcheck_dist.ledger.loss_backwards import own_backwards, words_of
from gradcheck_dist.ledger.mixed_labels import mixed_labels
from gradcheck_dist.ledger.references import without_emptied, without_references
from gradcheck_dist.ledger.repeated_batches import told_repeated
from gradcheck_dist.ledger.several_terms import several_terms
from gradcheck_dist.ledger.summed_losses import summed_losses
from gradcheck_dist.ledger.vocabulary_shards import unlike_shards
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import plural

UNEXPLAINED = "GS000"
UNPAIRED = "GS802"
"""Rests on gradients of one loss that differ between ranks, as they do where the loss's weight does."""
CLIP_BY_HAND = "GS601"
"""Its weights hold a clip that was meant and one that was not: what would have come without the fault is not known."""

MAKE_UP = (makes_up_for, share_is_made_up_for, part_of_one_loss, copies_are_made_up_for, whole_is_counted_once)
"""Why what is off may be right: something that no weight shows makes up for it."""


@dataclass(frozen=True)
class Judge:
    """One step, which is judged under other assumptions, too, if it is wrong: under each of them once."""

    run: Run
    step: int
    objective: str
    objective_from: str
    known: dict[Assumed, StepVerdict] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)

    def assuming(self, assumed: Assumed) -> StepVerdict:
        if assumed not in self.known:
            question = (self.run, self.step, self.objective, self.objective_from)
            self.known[assumed] = _judge_as(*question, assumed, self)
        return self.known[assumed].copy()


def judge_step(run: Run, step: int, objective: str, objective_from: str) -> StepVerdict:
    """Judge one optimizer step."""
    read = without_references(run, step)
    judge = Judge(read.run, step, objective, objective_from)
    verdict = judge.assuming(Assumed())
    if verdict.findings or verdict.reasons:
        left = without_emptied(read, step, perhaps_gone(verdict.held, verdict.data, verdict.contributions))
        if left is not read:
            read, judge = left, Judge(left.run, step, objective, objective_from)
            verdict = judge.assuming(Assumed())
    if verdict.counted and not verdict.findings:
        verdict.uncounted = uncounted(judge.assuming(Assumed(aside=verdict.counted)))
    if verdict.findings and may_be_one_batch(verdict.data, verdict.contributions):
        verdict.one_batch = judge.assuming(Assumed(one_batch=True))
    verdict.references = read.params
    verdict.remarks += read.remarks
    return verdict


@left_open
@np.errstate(all="ignore")  # a damaged trace holds any number, and what comes of it is not finite or does not fit
def _judge_as(run: Run, step: int, objective: str, objective_from: str, assumed: Assumed, judge: Judge) -> StepVerdict:
    """The step by the reading of its records that explains most."""

    def read(how: Reading) -> StepVerdict:
        verdict, own = read_step(run, step, objective, objective_from, assumed, how, judge.measurements)
        return _judged(verdict, own, assumed, how, judge)

    verdict = read(Reading())
    if looks := verdict.looks:
        verdict = judge.assuming(replace(assumed, aside=assumed.aside | looks))
        verdict.remarks.append(
            f"the gradients of {plural(len(looks), 'pass')} were handed to the caller, and nothing of these is in what "
            "the optimizer reads. No other loss counts tokens there, and others train: a look, and no part of the step"
        )
        return verdict
    if hands_on(verdict.data) and not verdict.comes_out_right:
        changed, own_losses = changed_on_the_way(verdict.data), read(Reading(handed=False))
        if changed or not _one_fault(verdict, own_losses):
            verdict = own_losses
            verdict.reasons += changed
    apart = adds_up_apart(verdict.spreads)
    if apart and mixed_labels(verdict.data) is not None:
        mixed = read(Reading(mixed=True))
        if mixed.comes_out_right and mixed.all_right:
            return mixed
    terms = several_terms(verdict.data) if apart or verdict.findings else None
    if terms is not None and not verdict.context.of_samples:
        as_terms = read(Reading(terms=True))
        right = as_terms.comes_out_right and as_terms.all_right
        if right or (terms.partly and len(as_terms.findings) < len(verdict.findings)):
            return as_terms
    if verdict.findings and summed_losses(verdict.data, perhaps=True) != summed_losses(verdict.data):
        summed = read(Reading(summed=True))
        if summed.num_accused < verdict.num_accused:
            summed.summed = True
            return summed
    if verdict.findings and any(filled_up(verdict.data)):
        picked = read(Reading(picked=True))
        if _unexplained_of(picked) < _unexplained_of(verdict):
            picked.remarks.append(told_picked(verdict.data))
            return picked
    if verdict.findings and not verdict.context.as_written:
        # Behind a clip by hand, which is known after the weights are judged, they are right by none as measured.
        for nr, _ in enumerate(as_written(verdict.contributions, verdict.data.events)):
            written = read(Reading(written=nr))
            if written.comes_out_right and not written.findings:
                return written
    return verdict


def _unexplained_of(verdict: StepVerdict) -> tuple[int, int, int, int]:
    """How much a reading of a step leaves to be told: findings, those that no rule explains, those that are no one
    factor, parameters."""
    codes = [one.code for one in verdict.findings]
    shapes = [shape.kind for one in verdict.findings if (shape := verdict.shape_of(one)) is not None]
    return len(codes), codes.count(UNEXPLAINED), len(shapes) - shapes.count("uniform"), verdict.num_accused


def _one_fault(handed: StepVerdict, own_losses: StepVerdict) -> bool:
    """Whether what is wrong with the passes that have losses is all that is wrong with those which hand on what these
    left, too."""

    def told(verdict: StepVerdict) -> list[tuple[str, str | None]]:
        return [(one.code, one.factor.exact if one.factor is not None else None) for one in verdict.findings]

    return len(told(own_losses)) == 1 and told(handed) == told(own_losses)


def _judged(
    verdict: StepVerdict, own: dict[int, set[int]] | None, assumed: Assumed, how: Reading, judge: Judge
) -> StepVerdict:
    """What was read of a step, judged."""
    step = judge.step
    data, recorded = verdict.data, verdict.contributions
    weighed = weigh(judge.run, verdict, own, assumed, how, judge.measurements)
    norms = step_norms(judge.run, data, recorded.coordinate)
    verdict.grad_norm = None if verdict.lost or judge.run.missing_ranks else norms.of_model()
    verdict.remarks += [*losses_beside(recorded, data.events, verdict.held), *told_evaluated(data.events)]
    verdict.remarks += told_repeated(data, recorded)
    verdict.term_weights = list(term_weights(recorded, data.events, verdict.held))
    if weighed is None:
        verdict.reasons += [] if verdict.lost else weighed_apart(recorded)
        return verdict
    strange = not_finite(step, norms)
    if any(held.observed is not None for held in verdict.held):
        verdict.remarks += strange
    else:
        verdict.reasons += strange
    cases, hidden, by_norm, scaled = _cases(verdict, weighed, norms)
    for case in cases:
        case.norms = norms
    verdict.reasons += [*not_attached(data), *stepped_again(data), *arrived_twice(data)]
    if not data.complete:
        cases = _not_to_come(cases, verdict.held)
    cases = without_uncounted(cases, recorded, verdict.contributions, verdict.held)
    cases = without_combined(cases, weighed.means)
    cases, parted = leave_shards_open(cases, data)
    cases, whole = leave_whole_open(cases, data)
    cases, meant = leave_open(cases, data)
    cases, made_up = leave_open(cases, data, MAKE_UP)
    verdict.own_parts, verdict.begun_alike = parts_handed_on(cases, data), begun_alike(data)
    verdict.reasons += [*parted, *whole, *meant, *made_up]
    if hidden is None:
        hidden = [ratio for case in cases for ratio in case.culprit.hidden]
    _tell(verdict, weighed, recorded, cases, hidden, norms)
    verdict.remarks += told_hooks(data) if verdict.findings else []
    verdict.kept_apart = kept_apart(verdict) if verdict.findings or verdict.changes else None
    relative, expected = weighed.target.relative, weighed.target.expected
    found = frozenset(finding.code for finding in verdict.findings)
    on_the_way = weighed.on_the_way
    facts = StepFacts(verdict.context, data, recorded, norms, verdict.held, found, on_the_way, bool(verdict.changes))
    facts = replace(facts, made_up=bool(made_up), as_measured=weighed.as_measured, by_norm=by_norm, scaled=scaled)
    backwards = list(own_backwards(data.events))
    if backwards := [*backwards, *unlike_shards(data.events, backwards)]:
        with_them = judge.assuming(replace(assumed, given=True))
        if with_them.comes_out_right and all(one.is_multiple for one in backwards):
            with_them.remarks.append(words_of(backwards))
            return with_them
        effects = list(with_them.effects.values()) if not found else []
        alone_do = effects[0] if len(effects) == 1 else None
        facts = replace(facts, own_backwards=tuple(backwards), effect_of_backwards=alone_do)
        if facts.weights_right and all(one.is_multiple for one in backwards):
            return _laid_to_backwards(with_them, facts)
    by_weights = unequal_weights(data, recorded, norms)
    remarks = [one for one in audit(facts, verdict.units) if one.finding.code != UNPAIRED or not by_weights[0]]
    _part_units(verdict, remarks)
    verdict.weights = weights(step, verdict.held, verdict.units, recorded, None if relative else expected)
    verdict.findings = [one for one in verdict.findings if not any(other.explains(one) for other in remarks)]
    for one in remarks:
        if not any(other.explains(one.finding) for other in remarks):
            verdict.found(one.finding, one.effect)
            verdict.beside_weights.append(one.finding)
    verdict.reasons += [*faults(data, recorded, facts.wholly_right).reasons, *open_attention(data)]
    verdict.reasons += open_labels(data, recorded)
    if facts.by_norm is not None and not verdict.findings:
        verdict.reasons += facts.by_norm.in_one_model(recorded.coordinate)
    if facts.weights_right:
        verdict.reasons += [*shares_of_one_loss(data, recorded), *counted_for_each_copy(data, recorded)]
        verdict.reasons += [*whole_for_each(data, recorded), *unlike_reads(data, verdict.held)]
    unequal = by_weights if by_weights[0] else unequal_losses(data, recorded, norms)
    for reasons, values in (unequal, no_distribution(data)):
        verdict.reasons, verdict.remarks = verdict.reasons + reasons, verdict.remarks + values
    verdict.audited = audited(facts)
    if not assumed.drop_lost and (LOST in found or (found and _passes_are_gone(weighed.measured, recorded))):
        without = judge.assuming(Assumed(drop_lost=True, alone=assumed.alone))
        if lacking := {key[0] for key in recorded.by_key} - {key[0] for key in without.contributions.by_key}:
            without.conduct = None  # what is right of some ranks' losses is not of all
            without.reasons.append(only_others_gave(step, lacking))
        right = without.comes_out_right and without.all_right
        if LOST in found or right or len(without.findings) < len(verdict.findings):
            verdict.without_lost = without
            objective, kept = without.context.objective, without.contributions
            verdict.thrown = thrown_away(data, objective, recorded, kept) if right else None
        if LOST in found and right:
            _lay_to_lost(verdict)
    if own is None and UNREDUCED in found:
        verdict.alone = judge.assuming(Assumed(drop_lost=assumed.drop_lost, alone=True))
    return verdict


def _part_units(verdict: StepVerdict, remarks: Sequence[Audited]) -> None:
    """Let units lie in whole in, or outside of, what the rules found besides wrong weights."""
    before, verdict.units = verdict.units, parted(verdict.units, [one.params for one in remarks], verdict.held)
    pieces: dict[str, set[str]] = defaultdict(set)
    for param, unit in before.items():
        pieces[unit].add(verdict.units[param])
    for finding in [*verdict.findings, *(change.finding for change in verdict.changes)]:
        finding.units = sorted({piece for unit in finding.units for piece in pieces.get(unit, {unit})})
    for one in remarks:
        one.finding.units = sorted({verdict.units.get(param, param[1]) for param in one.params})


def _passes_are_gone(measured: list[Held], contributions: Contributions) -> bool:
    """Whether nothing of some passes is in any gradient, on all ranks, or nothing of some ranks: emptied, maybe by a
    line that nobody records, or left aside (a replica that heals gives zeros)."""
    weighs, gone = (found & set(contributions.by_key) for found in weighing_or_gone(measured))
    of_passes = {key[1:] for key in weighs}.isdisjoint({key[1:] for key in gone})
    of_ranks = {key[0] for key in weighs}.isdisjoint({key[0] for key in gone})
    return bool(weighs and gone) and (of_passes or of_ranks)


def _lay_to_lost(verdict: StepVerdict) -> None:
    """Take away what follows from lost passes: the others are right among themselves, and a count without these is no
    wrong one."""
    for one in verdict.errors:
        if one.code != LOST and cause(one) in verdict.shapes:
            verdict.take_away(one)


def _laid_to_backwards(verdict: StepVerdict, facts: StepFacts) -> StepVerdict:
    """The verdict on a step by the weights that loss functions' backwards gave, which alone made them wrong."""
    verdict.findings, verdict.beside_weights, verdict.changes, verdict.effects = [], [], [], {}
    for one in audit(facts, verdict.units):
        verdict.found(one.finding, one.effect)
        verdict.beside_weights.append(one.finding)
    verdict.audited = audited(facts)
    return verdict


def _cases(
    verdict: StepVerdict, weighed: Weighed, norms: StepNorms
) -> tuple[list[Case], Sequence[float] | None, HandNorm | None, ScaledClip | None]:
    """Wrong weights by whom they are laid to, once a clip that the trainer wrote itself is taken out; the factors that
    such a clip hides, None where there is none; such a clip that took a wrong norm; and one of scaled gradients."""
    data, target = verdict.data, weighed.target
    cases = cases_of(verdict, weighed.measured, target)
    if weighed.freed:
        return cases, None, None, None
    by_hand = clip_by_hand(cases, data, norms)
    if by_hand is not None:
        cases = _without(verdict, weighed, by_hand)
        if (more := undone(cases, by_hand)) is not None:
            by_hand = more
            cases = _without(verdict, weighed, by_hand)
        verdict.remarks.append(by_hand.text)
        verdict.reasons += [by_hand.reason] if by_hand.reason else []
        verdict.assumed = by_hand.assumed
    scaled = scaled_clip(cases, data, norms) if by_hand is None else None
    if scaled is not None:
        cases = _judged_again(verdict, freed(weighed.measured, scaled.factor), target)
        verdict.remarks.append(f"step {data.step}: {scaled.text}")
        return cases, None, None, scaled
    by_norm = wrong_norm(cases, verdict.held, data, norms) if by_hand is None else None
    if by_hand is None and by_norm is None and (by_hand := _clip_beside(cases, verdict, weighed, norms)) is not None:
        cases = _without(verdict, weighed, by_hand)
        verdict.remarks.append(by_hand.text)
        verdict.assumed = by_hand.assumed
    if by_norm is not None:
        cases = _judged_again(verdict, freed_by_rank(weighed.measured, by_norm), target)
        verdict.remarks.append(f"step {data.step}: {by_norm.text}")
    if by_hand is None and by_norm is None:
        cases = _beside_clips_of_params(cases, verdict, weighed)
    if not cases and verdict.assumed is None:
        verdict.divided = divisions(data, verdict.held, verdict.context.quantities)
    return cases, by_hand.hidden if by_hand is not None else None, by_norm, None


def _beside_clips_of_params(cases: list[Case], verdict: StepVerdict, weighed: Weighed) -> list[Case]:
    """The cases as they are once weights are freed of what lines did to each gradient apart, where these are fewer."""
    factors = of_params(cases, verdict.held, verdict.data, weighed.target.contributions)
    if factors is None:
        return cases
    before = verdict.held, verdict.units
    again = _judged_again(verdict, freed_of_params(weighed.measured, factors), weighed.target)
    again += [case for case in cases if is_last(case)]
    if len(again) < len(cases):
        return again
    verdict.held, verdict.units = before
    return cases


def _clip_beside(cases: Sequence[Case], verdict: StepVerdict, weighed: Weighed, norms: StepNorms) -> HandClip | None:
    """A clip by hand beside something else, which sets gradients apart, or the weights in each of them."""
    found = clip_of_most(cases, verdict.held, verdict.data, norms)
    apart = bool(cases) and all(case.pattern.kind != "uniform" for case in cases)
    if found is not None or not apart or weighed.target.relative:
        return found
    return clip_of_line(verdict.held, verdict.data, norms)


def _without(verdict: StepVerdict, weighed: Weighed, clip: HandClip) -> list[Case]:
    """What is wrong in a step that is freed of a clip by hand."""
    return _judged_again(verdict, freed(weighed.measured, clip.factor), weighed.target)


def _judged_again(verdict: StepVerdict, measured: list[Held], target: Aim) -> list[Case]:
    verdict.held = judge(measured, target.contributions, target.expected)
    verdict.units = unit_of(verdict.held)
    return cases_of(verdict, measured, target)


def _not_to_come(cases: list[Case], held: list[Held]) -> list[Case]:
    """What is wrong whatever still had to come before an optimizer that never came. Where no weight is right, the
    number of tokens may be wrong: ranks that broke off in the middle of a step leave some of its passes out. Of a rank
    whose weights are all wrong a line that divides them may lie ahead, which others have behind them."""
    right = {one.rank for one in held if any(cell.right for cell in one.cells)}
    for case in cases:
        case.everywhere = case.everywhere or right.isdisjoint(one.rank for one in case.held)
    return [case for case in cases if not (case.culprit.absent or case.culprit.is_open)]


def _tell(
    verdict: StepVerdict,
    weighed: Weighed,
    recorded: Contributions,
    cases: list[Case],
    hidden: Sequence[float],
    norms: StepNorms,
) -> None:
    """Turn cases into findings, those of auxiliary loss terms with them."""
    data, target = verdict.data, weighed.target
    inferred = verdict.own_terms.shares if verdict.own_terms is not None else {}
    terms = judge_terms(verdict.context, data.events, recorded, target.expected, cases, inferred)
    verdict.reasons += terms.reasons
    verdict.remarks += terms.remarks
    told = [*cases, *terms.cases]
    verdict.units = parted(verdict.units, [{held.param for held in case.held} for case in told], verdict.held)
    for case in told:
        case.norms = norms
        finding = samples.in_sequences(_finding(case, verdict)) if target.of_samples else _finding(case, verdict)
        if finding.code == UNEXPLAINED and (means := mean_over_samples(case, verdict.held, target.tokens)):
            verdict.reasons.append(means)
            continue
        tell_hidden(case, finding, hidden)
        verdict.shapes[cause(finding)] = case.pattern
        if case.names:
            verdict.made_of[cause(finding)] = case.names[0].powers
        verdict.scaling = scaling_of(case, data, norms) or verdict.scaling
        known = not case.terms and finding.code != CLIP_BY_HAND
        of_step = (data, norms, verdict.held, target.contributions, target.expected)
        note(verdict, case, finding, effect_of_case(case, *of_step) if known else None)


def _finding(case: Case, verdict: StepVerdict) -> Finding:
    """Let the rules name a case; GS000 names what no other does."""
    for rule in all_rules():
        answer = rule.judge(case) if hasattr(rule, "judge") else None
        if answer is None:
            continue
        if answer.culprit is not None:
            case.culprit = answer.culprit
            case.configured_at = configured_at(verdict.data, case.culprit)
        lines = loss_lines(case, verdict.held)
        looks = rule.CODE == UNEXPLAINED and case.culprit.write is None and not case.culprit.lines
        fix = "" if lines and looks else answer.fix  # which would have these lines looked for
        return Finding(
            code=rule.CODE,
            name=rule.NAME,
            severity=answer.severity,
            step=case.context.step,
            factor=answer.factor or factor_of(case),
            pattern=answer.pattern or case.pattern.text,
            units=sorted({verdict.units[held.param] for held in case.held}),
            num_parameters=len({held.param for held in case.held}),
            ranks=case.ranks,
            first_event=first_event(case, lines),
            explanation=answer.explanation + in_words(lines),
            fix=mended(case, lines, fix),
            suggested_experiment=None if lines else between_rivals(case) or answer.suggested_experiment,
            steps=[case.context.step],
        )
    raise AssertionError("GS000 answers every case")
