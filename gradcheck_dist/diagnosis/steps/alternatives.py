"""Other ways to see a step, each judged beside it and taken where the whole run speaks for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from gradcheck_dist.diagnosis.losses.one_batch import are_of_one_batch
from gradcheck_dist.diagnosis.steps.step_verdict import Cause, StepVerdict, cause
from gradcheck_dist.ledger.apart import averaged, trained_later
from gradcheck_dist.ledger.expected import TOTALS
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import numbered

LOST = "GS401"
SKIPPED_APART = frozenset({"GS607", "GS609"})
UNREDUCED = "GS103"
SAME = 1e-3
"""Relative."""
SEVERAL = 4
"""Models that a program makes one after the other: a pair, and a reference for each, are a program's own."""
MADE_ANEW = "made anew"
OF_ALL = "rank's losses are divided by the tokens of all, and multiplied by the number of ranks"


def skipped_apart(verdict: StepVerdict) -> bool:
    """Whether some ranks skipped a step that others took: it stands, although not all optimizers came to it."""
    return any(finding.code in SKIPPED_APART for finding in verdict.findings)


def until_apart(verdicts: list[StepVerdict]) -> tuple[list[StepVerdict], list[str]]:
    """Behind a step that only some ranks of a model took, its parts are a step apart and their loss scales differ: what
    is off there is the consequence, and no fault of the lines that show it."""
    first = next((index for index, verdict in enumerate(verdicts) if skipped_apart(verdict)), None)
    if first is None:
        return verdicts, []
    behind = [verdict for verdict in verdicts[first + 1 :] if not skipped_apart(verdict)]
    if not behind:
        return verdicts, []
    kept = [*verdicts[: first + 1], *(verdict for verdict in verdicts[first + 1 :] if skipped_apart(verdict))]
    left_out = numbered("step", [verdict.context.step for verdict in behind])
    return kept, [
        f"{left_out} came after step {verdicts[first].context.step}, which only some ranks took: "
        "parts of the model are a step apart there: left out"
    ]


def without_warm_up(verdicts: list[StepVerdict]) -> tuple[list[StepVerdict], list[str]]:
    """Passes that were thrown away in some steps and not in others, and without which these are as the others are, are
    no fault: a warm-up in the first step, steps that a trainer skipped (a spike, an overflow that it looks for itself),
    a pass whose gradients are statistics."""
    lost = [_throws_away(verdict) for verdict in verdicts]
    if len(verdicts) < 2 or not any(lost) or all(lost):
        return verdicts, []
    only_first = lost[0] and not any(lost[1:])
    others = [verdict.without_lost if gone else verdict for verdict, gone in zip(verdicts, lost, strict=True)]
    chosen = [verdict for verdict in others if verdict is not None]
    if len(chosen) < len(verdicts):
        return verdicts, []
    usual = {cause(found) for one, gone in zip(verdicts, lost, strict=True) if not gone for found in one.findings}
    shown = {cause(found) for one, gone in zip(chosen, lost, strict=True) if gone for found in one.findings}
    by_line = any(found.code == LOST for found in verdicts[0].findings)
    if shown - usual and not (only_first and by_line) and not _fewer_without(verdicts, chosen, lost, shown - usual):
        return verdicts, []
    if only_first and _were_counted(verdicts, chosen):
        return verdicts, []
    where = numbered("step", [verdict.context.step for verdict, gone in zip(verdicts, lost, strict=True) if gone])
    if only_first:
        note = f"{where}: a backward pass whose gradients were emptied, as in no later step, is taken for a warm-up"
    else:
        note = (
            f"{where}: passes whose gradients were emptied before the optimizer came, as not in all steps, are "
            "taken for steps that were skipped on purpose, or for statistics"
        )
    return chosen, [note]


def _fewer_without(
    verdicts: list[StepVerdict], without: list[StepVerdict], lost: list[bool], unusual: set[Cause]
) -> bool:
    """Whether the steps that show something unusual also without the passes that they throw away, a fault of their own,
    have fewer findings so than with them."""
    pairs = [(one, other) for one, other, gone in zip(verdicts, without, lost, strict=True) if gone]
    wrong = [pair for pair in pairs if any(cause(found) in unusual for found in pair[1].findings)]
    return all(len(other.findings) < len(one.findings) for one, other in wrong)


def _throws_away(verdict: StepVerdict) -> bool:
    """Whether passes were thrown away, by a recorded line or by one that nobody records; of these it is known where the
    step is right without them, or which step may have lost them."""
    by_line = any(finding.code == LOST for finding in verdict.findings)
    return by_line or verdict.without_lost is not None or verdict.untold


def _were_counted(verdicts: list[StepVerdict], without_first: list[StepVerdict]) -> bool:
    """Whether what the first step threw away belongs to it: nothing else is wrong there, and without it something is
    that no later step shows, as its tokens were divided by."""
    later = {finding.code for verdict in verdicts[1:] for finding in verdict.findings}
    alone = all(finding.code == LOST for finding in verdicts[0].findings)
    return alone and any(finding.code not in later for finding in without_first[0].findings)


def with_one_batch(verdicts: list[StepVerdict]) -> list[StepVerdict]:
    """The steps as they are where the passes of each evaluate one batch, if no two steps have the same."""
    told = are_of_one_batch([verdict.contributions for verdict in verdicts])
    return [
        verdict.one_batch if verdict.one_batch is not None and of_one else verdict
        for verdict, of_one in zip(verdicts, told, strict=True)
    ]


def may_all_be_one_batch(verdict: StepVerdict, earlier: Sequence[StepVerdict]) -> bool:
    """Whether what a step is accused of may be gone once another one is judged, whose labels tell that its passes
    evaluate one batch."""
    if verdict.one_batch is None:
        return False
    return not earlier or not with_one_batch([*earlier[-1:], verdict])[-1].errors


def trained_apart(run: Run, verdicts: Sequence[StepVerdict]) -> str | None:
    """What tells that ranks train apart, in words: then their steps are judged by `alone`. None where they do not."""
    if all(verdict.alone is None for verdict in verdicts) or any(verdict.shares_updates for verdict in verdicts):
        return None
    if (found := averaged(run)) is not None:
        return (
            f"{found.words}: local SGD, DiLoCo and other averages of parameters do this. So each rank's gradients are "
            "judged on its own tokens (inferred); how parameters are averaged is not judged"
        )
    if not _are_made_anew(run, verdicts):
        return None
    return (
        f"train models that are {MADE_ANEW}, one after the other: inner loops of meta-learning, federated clients and "
        "searches do this. So each rank's gradients are judged on its own tokens (inferred); what becomes of these "
        "models is not judged"
    )


def _are_made_anew(run: Run, verdicts: Sequence[StepVerdict]) -> bool:
    """Whether several models were trained of which none came again, also behind the recorded steps."""
    models = [frozenset(one.param for one in verdict.held) for verdict in verdicts]
    in_turn = [model for index, model in enumerate(models) if index == 0 or model != models[index - 1]]
    apart = all(one.isdisjoint(other) for one, other in combinations(in_turn, 2))
    later = min(map(len, trained_later(run).values()), default=0)
    return apart and len(in_turn) + later >= SEVERAL


def training_apart(run: Run, verdicts: list[StepVerdict]) -> list[StepVerdict]:
    """Ranks that never reduce gradients and whose parameters are averaged instead (local SGD, DiLoCo), or that go from
    one model to the next, train apart on purpose: each is judged on its own tokens. The verdict stays open, since
    nobody follows the average. Where ranks divide the updates among them (ZeRO), what makes parameters alike again is
    the one rank's that stepped them."""
    found = trained_apart(run, verdicts)
    if found is None:
        return verdicts
    chosen = [verdict if verdict.alone is None else verdict.alone for verdict in verdicts]
    steps = [verdict.context.step for verdict in verdicts if verdict.alone is not None]
    where = f" in {numbered('step', steps)}" if len(steps) < len(verdicts) else ""
    chosen[0].reasons.append(f"ranks reduce no gradients between them{where}, and {found}")
    for verdict in chosen:
        if _take_shares_away(verdict):
            verdict.reasons.append(
                "every token weighs as much as in a mean over all ranks' tokens once parameters are averaged: each "
                f"{OF_ALL}"
            )
    return chosen


def leave_shares_open(verdicts: Sequence[StepVerdict]) -> None:
    """Losses that are divided by the tokens of all ranks are none that ranks have which train models of their own: that
    they hold different ones may be the fault, and these losses are none."""
    for verdict in verdicts:
        if verdict.context.apart and _take_shares_away(verdict):
            verdict.reasons.append(
                f"each {OF_ALL}, as where ranks train one model whose gradients they average: most likely parameters "
                "that ranks drew from seeds of their own are left out of the wrapper that reduces (adapters behind "
                "fully_shard)"
            )


def _take_shares_away(verdict: StepVerdict) -> bool:
    """Take back what weights are accused of, where these are each rank's share of a mean over the tokens of all."""
    of_weights = [one for one in verdict.findings if not any(one is other for other in verdict.beside_weights)]
    if not of_weights or not _are_shares(verdict):
        return False
    for one in of_weights:
        verdict.take_away(one)
    return True


def _are_shares(verdict: StepVerdict) -> bool:
    """Whether the mean over ranks of their gradients is a mean over the tokens of all of them."""
    total, ranks = verdict.contributions.num_tokens, verdict.contributions.num_coordinates
    known = [weight.observed for weight in verdict.weights if weight.observed is not None]
    known = known if verdict.context.objective in TOTALS and total else []
    return bool(known) and all(abs(one * (total or 0) / ranks - 1) <= SAME for one in known)
