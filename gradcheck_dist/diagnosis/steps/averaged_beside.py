"""Parameters whose gradients lack a reduction, beside others that are reduced, and that something makes up for: what
their optimizer left is averaged behind steps, or they move alike whenever they move at all."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.open_cases.inside_step import NOT_FOLLOWED
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.ledger.param_updates import are_alike, is_averaged, num_moved_of
from gradcheck_dist.ledger.tracks import ParamKey

LACKING = "GS103"
AVERAGED = "lines average their values behind steps"


def leave_averaged_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse nobody of a reduction that is made up for behind the step, or inside of the optimizer's, as other steps
    tell where this one moved nothing."""
    averaged = _all_averaged(verdicts)
    for verdict in verdicts:
        verdict.apart -= averaged
        for finding in [one for one in verdict.errors if one.code == LACKING]:
            keys = {param for param, unit in verdict.units.items() if unit in finding.units}
            if (reason := _made_up_for(keys, averaged, verdict, verdicts)) is not None:
                verdict.take_away(finding)
                verdict.reasons.append(reason)


def _all_averaged(verdicts: Sequence[StepVerdict]) -> frozenset[ParamKey]:
    """The parameters that are alike again when a step begins."""
    in_order = sorted(verdicts, key=lambda one: one.context.step)
    of_steps = {key: [one.updates[key] for one in in_order if key in one.updates] for key in _all_looked_at(verdicts)}
    return frozenset(key for key, updates in of_steps.items() if is_averaged(updates))


def _all_looked_at(verdicts: Sequence[StepVerdict]) -> set[ParamKey]:
    return {key for verdict in verdicts for key in verdict.updates}


def _made_up_for(
    keys: set[ParamKey], averaged: frozenset[ParamKey], verdict: StepVerdict, verdicts: Sequence[StepVerdict]
) -> str | None:
    """Why they lack nothing, in words. Those of many that were not looked at go by the others."""
    seen = keys & verdict.updates.keys()
    names = in_short(sorted(name for _, name in keys))
    if seen and seen <= averaged:
        return (
            f"optimizers leave {names} unlike on ranks, and these are alike again when a step begins: {AVERAGED}, "
            "which is not followed, so how much each rank weighs there is not judged"
        )
    if not seen or any(num_moved_of(verdict.updates[key]) for key in seen):
        return None
    for other in verdicts:
        moved = [other.updates[key] for key in seen if key in other.updates]
        alike = len(moved) == len(seen) and all(are_alike(one) and num_moved_of(one) for one in moved)
        if alike and all(one.code != LACKING for one in other.errors):
            return (
                f"no gradient of {names} is reduced, and this step does not move them; step {other.context.step} moves "
                f"them alike on all ranks: {NOT_FOLLOWED}"
            )
    return None
