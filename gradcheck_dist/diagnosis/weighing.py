"""What was recorded of a step, and its observed weights laid beside the expected ones: what a judgement begins with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from gradcheck_dist.diagnosis.audits.equal_summands import in_parts
from gradcheck_dist.diagnosis.audits.verified import left_out, not_summed, not_verified, nothing_verified, verified
from gradcheck_dist.diagnosis.losses import samples
from gradcheck_dist.diagnosis.losses.aim import Aim
from gradcheck_dist.diagnosis.losses.aims import aim, independent
from gradcheck_dist.diagnosis.losses.beside_counted import counted_beside
from gradcheck_dist.diagnosis.losses.kinds import kind_by_kind
from gradcheck_dist.diagnosis.losses.returned import looked_at_alone
from gradcheck_dist.diagnosis.losses.several_losses import OwnMeans, loss_by_loss
from gradcheck_dist.diagnosis.losses.sources import source_by_source
from gradcheck_dist.diagnosis.losses.tasks import task_by_task
from gradcheck_dist.diagnosis.losses.weighted_tokens import spreads_of_losses
from gradcheck_dist.diagnosis.norms.step_norms import step_norms
from gradcheck_dist.diagnosis.open_cases.unsummed_ties import maybe_tied
from gradcheck_dist.diagnosis.steps.across import across, left_across, without_emptied_across
from gradcheck_dist.diagnosis.steps.changed_in import name_places
from gradcheck_dist.diagnosis.steps.clip_lines import clip_of_line, factor_of_line
from gradcheck_dist.diagnosis.steps.drift import set_apart
from gradcheck_dist.diagnosis.steps.hand_clip import freed
from gradcheck_dist.diagnosis.steps.lone import trained_alone
from gradcheck_dist.diagnosis.steps.open_steps import (
    counted_again,
    infinite_losses,
    numbered_apart,
    out_of_sight,
    passes_unmatched,
    tokens_known,
    uncounted,
    unmade,
    unseen,
    weighed_apart,
    why_not,
)
from gradcheck_dist.diagnosis.steps.other_steps import conduct_of, writes_of
from gradcheck_dist.diagnosis.steps.own_divisors import own_divisors
from gradcheck_dist.diagnosis.steps.reads import reads_of
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.steps.turns import turn_of
from gradcheck_dist.diagnosis.steps.unfollowed import from_before, moving
from gradcheck_dist.diagnosis.steps.units import unit_of
from gradcheck_dist.diagnosis.steps.waiting import unread_in
from gradcheck_dist.diagnosis.weights.alike import without_repeats
from gradcheck_dist.diagnosis.weights.cells import Held, judge
from gradcheck_dist.diagnosis.weights.context import step_context
from gradcheck_dist.diagnosis.weights.measured import measure
from gradcheck_dist.ledger.apart import apart, own_coordinates, own_models, share_updates, told_apart
from gradcheck_dist.ledger.chunks import told_chunks, told_unlaid, with_chunks
from gradcheck_dist.ledger.contributions import collect
from gradcheck_dist.ledger.discarded import without
from gradcheck_dist.ledger.given_gradients import with_given_gradients
from gradcheck_dist.ledger.handed_on import with_handed_on
from gradcheck_dist.ledger.known_elsewhere import unlike_parts, with_weights_of_others
from gradcheck_dist.ledger.largest import with_picked
from gradcheck_dist.ledger.leaves import same_tokens
from gradcheck_dist.ledger.looked_at import without_looks, without_losses_of
from gradcheck_dist.ledger.loss_backwards import as_given
from gradcheck_dist.ledger.lost import lost
from gradcheck_dist.ledger.mixed_labels import MixedLabels, mixed_labels
from gradcheck_dist.ledger.param_updates import all_moved_alike, updates_by_param
from gradcheck_dist.ledger.picked_losses import picked_apart
from gradcheck_dist.ledger.sent_parameters import without_sent
from gradcheck_dist.ledger.several_terms import Terms, several_terms
from gradcheck_dist.ledger.strangers import strangers
from gradcheck_dist.ledger.summed_losses import summed_losses
from gradcheck_dist.ledger.tied import told, told_beside
from gradcheck_dist.ledger.tracks import Slot, StepData, step_data
from gradcheck_dist.ledger.transit import Transits, transits
from gradcheck_dist.ledger.unwritten import without_unwritten
from gradcheck_dist.trace.run import Run


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a step is taken for. `drop_lost`: passes whose gradients were thrown away are meant so. `alone`: ranks that
    reduce no gradients between them train models of their own. `given`: weights at losses are those that these losses'
    own backwards gave, and not those that arrived there. `aside`: by rank, passes whose losses are none of the step's.
    `one_batch`: passes of the same labels, inputs or targets evaluate one batch.
    """

    drop_lost: bool = False
    alone: bool = False
    given: bool = False
    aside: frozenset[tuple[int, Slot]] = frozenset()
    one_batch: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """How what was recorded is read. `handed`: passes that hand on what earlier ones left have these passes' tokens.
    `terms`: the losses that a pass adds up are terms with coefficients. `summed`: ranks of one batch that may train on
    the sum of their losses do so. `written`: which reading of losses in a sum is taken. `mixed`: losses that
    compare the same logits are one with mixed labels, also where their coefficients do not tell it. `picked`: of losses
    whose largest are taken all that are taken count, also those without a label."""

    handed: bool = True
    terms: bool = False
    summed: bool = False
    written: int | None = None
    mixed: bool = False
    picked: bool = False


class Records(NamedTuple):
    """A step as it was recorded, and as it is read; its losses as terms, and as such with mixed labels, where they are
    read so."""

    recorded: StepData
    data: StepData
    own_terms: Terms | None
    mixed: MixedLabels | None


def _alike(assumed: Assumed, how: Reading) -> tuple[Assumed, Reading]:
    """What decides how records are read and measured: on the rest depends only how weights are judged."""
    return replace(assumed, drop_lost=False, one_batch=False), replace(how, written=None)


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the gradients of a step showed, measured once for all that reads its records alike: replaying them takes
    most of the time that a judgement takes. Its records are read once as well, so that measurements and judgements
    speak of the same events, also where these were made anew (stages by hand get numbers)."""

    known: dict[tuple[Assumed, Reading], tuple[list[Held], Transits]] = field(default_factory=dict)
    records: dict[tuple[Assumed, Reading], Records] = field(default_factory=dict)

    def read(self, run: Run, step: int, assumed: Assumed, how: Reading) -> Records:
        alike = _alike(assumed, how)
        if alike not in self.records:
            recorded = step_data(run, step)
            data = without_sent(without_unwritten(with_chunks(without_looks(with_weights_of_others(recorded)))))
            data = without_losses_of(data, assumed.aside) if assumed.aside else data
            data = with_picked(data) if how.picked else data
            data = with_handed_on(data) if how.handed else data
            data = data if run.missing_ranks else with_given_gradients(data)
            data = as_given(data) if assumed.given else data
            mixed = mixed_labels(data)
            if mixed is not None and not (mixed.certain or how.mixed):
                mixed = None
            data = mixed.data if mixed is not None else data
            own_terms = several_terms(data) if how.terms else None
            data = own_terms.data if own_terms is not None else data
            self.records[alike] = Records(recorded, data, own_terms, mixed)
        return self.records[alike]

    def of(self, verdict: StepVerdict, assumed: Assumed, how: Reading) -> tuple[list[Held], Transits]:
        alike = _alike(assumed, how)
        if alike not in self.known:
            on_the_way = transits(verdict.data, verdict.contributions)
            measured = without_repeats(measure(verdict.data, verdict.contributions, on_the_way), verdict.data)
            measured = in_parts(measured, verdict.data, verdict.contributions.coordinate)
            self.known[alike] = measured, on_the_way
        measured, on_the_way = self.known[alike]
        return [replace(held) for held in measured], on_the_way


@dataclass
class Weighed:
    """The weights of a step as they were measured, and what they are compared with. `as_measured`: up to coefficients,
    which are what was measured. `freed`: of a clip by hand, without which nothing could be expected of them."""

    measured: list[Held]
    means: OwnMeans
    on_the_way: Transits
    freed: bool = False

    @property
    def target(self) -> Aim:
        return self.means.aim

    @property
    def as_measured(self) -> bool:
        return bool(self.means.reasons)


def read_step(
    run: Run,
    step: int,
    objective: str,
    objective_from: str,
    assumed: Assumed,
    how: Reading,
    measurements: Measurements,
) -> tuple[StepVerdict, dict[int, set[int]] | None]:
    """What was recorded of a step, with all that this leaves open; and the data coordinates that concern each rank,
    where ranks train models of their own."""
    recorded, data, own_terms, mixed = measurements.read(run, step, assumed, how)
    own_losses = summed_losses(data, perhaps=how.summed)
    contributions = same_tokens(
        data, collect(data.events, run.same_data, strangers(data), own_losses, picked_apart(data))
    )
    everyone = own_coordinates(data, contributions)
    models = own_models(data, everyone)
    own = everyone if assumed.alone or models else None
    if own is not None:
        data = apart(data, own)
    context = step_context(run, step, data.events, contributions, objective, objective_from)
    context.apart = own is not None
    verdict = StepVerdict(context, data, contributions, spreads=spreads_of_losses(contributions), own_terms=own_terms)
    verdict.lost, verdict.unread = lost(run, recorded), unread_in(data)
    verdict.reasons += [*([] if verdict.lost else why_not(run, data, contributions)), *nothing_verified(data.events)]
    verdict.unmade = [] if verdict.lost else unmade(data)
    verdict.reasons += [*not_summed(data), *unlike_parts(data), *maybe_tied(data)]
    verdict.remarks += [*moving(data), *not_verified(data.events), *contributions.problems, *told_chunks(data)]
    verdict.remarks += [mixed.remark] if mixed is not None else []
    verdict.verified, verdict.unverified = verified(data.events), left_out(data.events)
    verdict.remarks += [told(first, copies) for first, copies in data.tied.items()]
    verdict.remarks += [told_beside(one, other) for one, other in data.beside.items() if one < other]
    # Whole groups are set up so; a rank that is all by itself may as well have been forgotten.
    (verdict.remarks if all(len(ranks) > 1 for ranks in models) else verdict.reasons).extend(
        (told_unlaid(data) if models else []) or told_apart(models)
    )
    return verdict, own


def weigh(
    run: Run,
    verdict: StepVerdict,
    own: dict[int, set[int]] | None,
    assumed: Assumed,
    how: Reading,
    measurements: Measurements,
) -> Weighed | None:
    """Lay observed weights beside expected ones; None where too little of the step is known for that."""
    data, context = verdict.data, verdict.context
    contributions = replace(verdict.contributions, one_batch=assumed.one_batch)
    if verdict.lost or not tokens_known(run, data) or passes_unmatched(data) or out_of_sight(data):
        return None
    if numbered_apart(data):
        return None
    if strange := infinite_losses(contributions):
        verdict.reasons += strange
        return None
    measured, on_the_way = measurements.of(verdict, assumed, how)
    context.num_handed_over = len(on_the_way.matched)
    verdict.looks = looked_at_alone(data, contributions, measured)
    verdict.counted = counted_beside(data, contributions, measured)
    if (late := from_before(measured)) is not None:
        verdict.reasons.append(late)
        return None
    reached = across(data, contributions, measured)
    measured = without_emptied_across(reached, data, contributions, measured)
    verdict.remarks += left_across(reached)
    wanted = partial(aim, context.objective, data, contributions, drop_lost=assumed.drop_lost, written=how.written)
    aimed_at, is_freed = wanted(measured), False
    if aimed_at.relative:
        norms = step_norms(run, data, contributions.coordinate)
        if clip := clip_of_line(measured, data, norms):
            without_clip = freed(measured, clip.factor)
            if not (freely := wanted(without_clip)).relative:
                aimed_at, measured, is_freed = freely, without_clip, True
                verdict.remarks.append(clip.text)
        elif factor := factor_of_line(measured, data, norms):
            # Right but for that line: it is judged as any other, by what it leaves of right weights.
            freely = wanted(freed(measured, factor))
            aimed_at = aimed_at if freely.relative else freely
    understood = aimed_at.as_written or aimed_at.of_elements or aimed_at.of_means
    of_step = without(contributions, contributions.by_key.keys() - aimed_at.contributions.by_key.keys())
    verdict.reasons += [] if understood or aimed_at.of_samples else weighed_apart(of_step)
    context.of_weighted = aimed_at.of_weighted
    verdict.spreads = {} if understood and not context.of_weighted else spreads_of_losses(of_step)
    declared = not context.objective_from.startswith("assumed")
    aimed_at.decide(context.objective, declared=declared)
    if aimed_at.of_samples and not declared:
        context.objective, context.objective_from = samples.OBJECTIVE, samples.INFERRED
    told = (aimed_at, context.objective, data, measured)
    means = task_by_task(*told) or kind_by_kind(*told) or source_by_source(*told)
    means = means or loss_by_loss(*told)
    target = means.aim
    context.judged_on(target.contributions)
    context.models = independent(data, target.contributions)
    context.counted_once(target.again)
    context.shared_out = target.shared_out
    context.counts_forwards(means.forwards)
    verdict.contributions = target.contributions
    context.relative, context.of_means, context.as_written = target.relative, target.of_means, target.as_written
    context.of_samples = target.of_samples
    verdict.times, verdict.unlike = target.times, target.unlike
    verdict.loud, verdict.untold = target.loud, target.untold
    if target.of_samples and target.contributions.num_tokens:
        context.quantities["num_tokens"] = float(target.contributions.num_tokens)
    name_places(measured, data, target.contributions, target.expected)
    verdict.remarks += [*on_the_way.remarks, *means.remarks, *target.remarks]
    verdict.reasons += [*target.reasons, *means.reasons, *on_the_way.reasons]
    verdict.held = judge(measured, target.contributions, target.expected)
    verdict.reasons += [
        *unseen(verdict.held, target.expected, own),
        *counted_again(verdict.held),
        *uncounted(verdict.held, data, target.contributions.coordinate),
        *trained_alone(data, target.contributions.coordinate),
    ]
    verdict.reads = reads_of(data, verdict.held, target.contributions, target.expected)
    verdict.units = unit_of(verdict.held)
    verdict.apart = set_apart(verdict.held) - all_moved_alike(data)
    verdict.updates = updates_by_param(data)
    verdict.shares_updates = share_updates(verdict.data)
    verdict.writes = writes_of(data)
    verdict.conduct = conduct_of(data, verdict.held, target.contributions)
    verdict.turn = turn_of(data)
    verdict.own_divisors = own_divisors(target.contributions, data)
    return Weighed(measured, means, on_the_way, is_freed)
