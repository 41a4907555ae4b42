"""What was seen of which parameter, and which gradients nothing explains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

from gradcheck_dist.diagnosis.finding import Coverage, MissingProbe, Unidentifiable
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import ProbeError, ProbeStatus
from gradcheck_dist.ledger.names import plain_name
from gradcheck_dist.ledger.tied import ties
from gradcheck_dist.ledger.tracks import ParamKey, param_key
from gradcheck_dist.trace.run import Run, before_restart, unrecorded
from gradcheck_dist.wording import numbered


def coverage(run: Run, steps: list[list[Held]], references: Set[ParamKey] = frozenset()) -> Coverage:
    """What was seen of which parameter in the steps judged, `references` left out, and which probes could not hook."""
    trained = (param for trace in run.ranks.values() for param in trace.params.values() if param.requires_grad)
    params = {key: param for param in trained if (key := param_key(param)) not in references}
    judged = {held.param for step in steps for held in step}
    apart = {(stage, plain_name(name)) for stage, name in judged} - judged
    apart |= {copy for copy, first in ties(run).items() if first in judged | apart}
    # Stages of a pipeline by hand have numbers where a step is judged (ledger/chunks.py), and not where it is recorded.
    apart |= {(-1, plain_name(name)) for stage, name in judged if stage >= 0} - judged
    all_params = (set(params) - apart) | judged
    observed: set[ParamKey] = set()
    reasons: dict[ParamKey, str] = {}
    for held in (one for step in steps for one in step):
        if held.cells:
            observed.add(held.param)
        elif held.reason:
            reasons.setdefault(held.param, held.reason)
    turns = {key: param.sampled_every for key, param in params.items()}
    for param in all_params - observed:
        rests = turns.get(param, 1) > 1
        why = f"left out by the sampling plan: its turn is in one of {turns[param]} recorded steps" if rests else ""
        reasons.setdefault(param, why or "no gradient of it was seen where an optimizer reads")
    statuses = [event for trace in run.ranks.values() for event in trace.events if isinstance(event, ProbeStatus)]
    inactive = {(event.probe, event.reason) for event in statuses if not event.active}
    active = {event.probe for event in statuses if event.active} - {probe for probe, _ in inactive}
    problems = [*run.problems, *before_restart(run.path), *unrecorded(run.path)]
    for rank, trace in run.ranks.items():
        errors = [event for event in trace.events if isinstance(event, ProbeError)]
        problems += [f"rank {rank}: probe {error.probe} failed: {error.message}" for error in errors[:3]]
    return Coverage(
        parameters_total=len(all_params),
        parameters_observed=len(observed),
        unidentifiable=[
            Unidentifiable(parameter=_full_name(param), reason=reason)
            for param, reason in sorted(reasons.items())
            if param not in observed
        ],
        probes_active=sorted(active),
        probes_missing=[MissingProbe(probe=probe, reason=reason) for probe, reason in sorted(inactive)],
        problems=problems,
    )


def gaps(steps: list[tuple[int, list[Held]]]) -> list[str]:
    """Why a clean-looking matrix is not enough: parameters whose gradient nothing explains."""
    found: dict[tuple[tuple[str, ...], str], list[int]] = defaultdict(list)
    for step, held in steps:
        lost = [one for one in held if "no combination" in one.reason]
        for place in dict.fromkeys(one.changed_in for one in lost):
            found[tuple(sorted({_full_name(one.param) for one in lost if one.changed_in == place})), place].append(step)
    reasons = []
    for (names, place), of_steps in found.items():
        shown = in_short(names)
        when = "" if len(of_steps) == len(steps) else f" in {numbered('step', of_steps)}"
        where = f": {place}" if place else ""
        reasons.append(f"the gradient of {shown} is no combination of the recorded contributions{when}{where}")
    return reasons


def _full_name(param: ParamKey) -> str:
    return param[1] if param[0] < 0 else f"stage {param[0]}: {param[1]}"
