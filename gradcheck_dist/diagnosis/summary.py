"""The parts of a report that only gather: weights by unit, coverage, metrics, who ran what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from statistics import median

from gradcheck_dist.diagnosis.cells import Cell, Held, average
from gradcheck_dist.diagnosis.context import StepContext
from gradcheck_dist.diagnosis.culprit import Culprit
from gradcheck_dist.diagnosis.finding import (
    ContributionKey as ReportKey,
)
from gradcheck_dist.diagnosis.finding import (
    Coverage,
    MissingProbe,
    Overhead,
    RunInfo,
    Unidentifiable,
    UnitInfo,
    Weight,
)
from gradcheck_dist.events import Clip, Metric, OptimizerStep, ProbeError, ProbeStatus, Reduce, Site, StepEnd
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.names import plain_name
from gradcheck_dist.ledger.tied import ties
from gradcheck_dist.ledger.tracks import ParamKey, StepData, param_key
from gradcheck_dist.trace.run import Run, before_restart, unrecorded

MAX_WRITTEN = 10**4


def unit_of(held: list[Held]) -> dict[ParamKey, str]:
    """Parameters that came out alike, within tolerance, share a unit, named by what its parameters have in common."""
    cells: dict[ParamKey, Ratios] = defaultdict(dict)
    for one in held:
        shares = {key: _share(summands) for key, summands in _by_contribution(one).items()}
        cells[one.param].update({(one.rank, key): (share.ratio, share.margin) for key, share in shares.items()})
    groups: dict[int, list[tuple[Ratios, list[ParamKey]]]] = defaultdict(list)
    for param, ratios in sorted(cells.items(), key=lambda item: _looseness(item[1])):
        for reference, members in groups[param[0]]:
            if _alike(reference, ratios):
                members.append(param)
                break
        else:
            groups[param[0]].append((ratios, [param]))
    names: dict[ParamKey, str] = {}
    taken: set[str] = set()
    for stage, of_stage in sorted(groups.items()):
        for _, params in of_stage:
            name = "all parameters" if len(of_stage) == 1 else _unit_name([param[1] for param in sorted(params)])
            if len(groups) > 1:
                name = f"stage {stage}" if len(of_stage) == 1 else f"stage {stage}: {name}"
            base, count = name, 2
            while name in taken:
                name, count = f"{base} ({count})", count + 1
            taken.add(name)
            names.update(dict.fromkeys(params, name))
    return names


Ratios = dict[tuple[int, ContributionKey], tuple[float, float]]


def _looseness(ratios: Ratios) -> float:
    """How badly a parameter was measured: the best measured ones become the references."""
    return max((margin for _, margin in ratios.values()), default=float("inf"))


def _alike(first: Ratios, second: Ratios) -> bool:
    common = first.keys() & second.keys()
    if not common:  # shards on different ranks: compare what each contribution weighs
        one, other = ({key[1]: value for key, value in ratios.items()} for ratios in (first, second))
        return all(_same(one[key], other[key]) for key in one.keys() & other.keys())
    return all(_same(first[key], second[key]) for key in common)


def _same(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return abs(first[0] - second[0]) <= first[1] + second[1] + 1e-9


def _unit_name(params: list[str]) -> str:
    if len(params) == 1:
        return params[0]
    split = [name.split(".") for name in params]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) + ".*" if common else f"{params[0]} and {len(params) - 1} more"


def unseen(
    held: list[Held], expected: dict[ContributionKey, Fraction], own: dict[int, set[int]] | None = None
) -> list[str]:
    """Contributions whose weight no parameter of a rank shows: what was not seen must not be called right.

    Args:
        own: the data coordinates that concern each rank; None where all do.
    """
    seen: dict[tuple[int, int], set[ContributionKey]] = defaultdict(set)
    for one in held:
        if one.observed is not None:
            elsewhere = {key for key in expected if key[0] in one.elsewhere}
            seen[one.param[0], one.rank] |= {cell.key for cell in one.cells} | elsewhere
    missing = {
        key
        for (_, rank), keys in seen.items()
        for key in expected
        if key not in keys and (own is None or key[0] in own.get(rank, ()))
    }
    if not missing:
        return []
    shown = ", ".join(f"(data rank {d}, accumulation step {k}, microbatch {m})" for d, k, m in sorted(missing)[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return [f"the weight of contribution {shown}{more} cannot be told from the samples: take a larger sample"]


def unit_list(units: dict[ParamKey, str]) -> list[UnitInfo]:
    members: dict[str, list[str]] = defaultdict(list)
    for param, unit in units.items():
        members[unit].append(param[1])
    return [UnitInfo(unit=unit, parameters=sorted(set(names))) for unit, names in sorted(members.items())]


def weights(
    step: int,
    held: list[Held],
    names: dict[ParamKey, str],
    contributions: Contributions,
    expected: dict[ContributionKey, Fraction] | None,
) -> list[Weight]:
    """One row for each unit, holder and contribution: the mean over the unit's parameters. Without expected weights the
    observed ones are relative to the contribution's own gradient."""
    rows: dict[tuple[str, int, ContributionKey], list[Cell]] = defaultdict(list)
    for one in held:
        for key, summands in _by_contribution(one).items():
            rows[names[one.param], one.rank, key].append(_share(summands))
    result = []
    for (unit, rank, key), cells in sorted(rows.items()):
        nominal = median(cell.nominal for cell in cells)
        together = average(cells)
        result.append(
            Weight(
                step=step,
                unit=unit,
                holder_rank=rank,
                contribution=ReportKey(data_rank=key[0], accumulation_step=key[1], microbatch=key[2]),
                num_tokens=contributions.by_key[key].num_tokens,
                expected=float(expected[key]) if expected is not None else None,
                expected_exact=_exact(expected[key]) if expected is not None else None,
                nominal=nominal if nominal == nominal else None,
                observed=together.observed,
                ratio=together.ratio,
                stderr=together.stderr * max(abs(together.ratio), 1.0) * float(together.expected),
            )
        )
    return result


def _by_contribution(held: Held) -> dict[ContributionKey, list[Cell]]:
    cells: dict[ContributionKey, list[Cell]] = defaultdict(list)
    for cell in held.cells:
        cells[cell.key].append(cell)
    return cells


def _share(summands: list[Cell]) -> Cell:
    """A contribution whose gradient arrived as summands on several ranks (tensor parallel), as one cell: their mean."""
    if len(summands) == 1:
        return summands[0]
    count = len(summands)
    return replace(
        summands[0],
        nominal=sum(cell.nominal for cell in summands) / count,
        observed=sum(cell.observed for cell in summands) / count,
        ratio=sum(cell.ratio for cell in summands) / count,
        stderr=sum(cell.stderr**2 for cell in summands) ** 0.5 / count,
    )


def configured_at(data: StepData, culprit: Culprit) -> str | None:
    """The other line that matters, "file:line": where the wrapper that reduced was made, where a loss went backward."""
    event = culprit.event
    if culprit.gradient is not None and culprit.gradient.site is not None:
        return _users_line(culprit.gradient.site)
    if not isinstance(event, Reduce) or event.wrapper is None:
        return None
    wrapper = data.wrappers.get(culprit.rank, {}).get(event.wrapper)
    return _users_line(wrapper.site) if wrapper is not None and wrapper.site else None


def _users_line(site: Site) -> str:
    return site.called_from or f"{site.file}:{site.line}"


def coverage(run: Run, steps: list[list[Held]]) -> Coverage:
    """What was seen of which parameter in the steps judged, and which probes could not hook."""
    params = {param_key(p): p for trace in run.ranks.values() for p in trace.params.values() if p.requires_grad}
    judged = {held.param for step in steps for held in step}
    apart = {(stage, plain_name(name)) for stage, name in judged} - judged
    apart |= {copy for copy, first in ties(run).items() if first in judged | apart}
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
        reasons.setdefault(param, why or "no gradient of it was seen")
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


def _full_name(param: ParamKey) -> str:
    return param[1] if param[0] < 0 else f"stage {param[0]}: {param[1]}"


def _exact(weight: Fraction) -> str | None:
    """A weight as a fraction, where it is one that a person would write."""
    return str(weight) if weight.numerator < MAX_WRITTEN else None


def gaps(steps: list[tuple[int, list[Held]]]) -> list[str]:
    """Why a clean-looking matrix is not enough: parameters whose gradient nothing explains."""
    found: dict[tuple[tuple[str, ...], str], list[int]] = defaultdict(list)
    for step, held in steps:
        lost = [one for one in held if "no combination" in one.reason]
        for place in dict.fromkeys(one.changed_in for one in lost):
            found[tuple(sorted({_full_name(one.param) for one in lost if one.changed_in == place})), place].append(step)
    reasons = []
    for (names, place), of_steps in found.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        when = "" if len(of_steps) == len(steps) else f" in step {', '.join(map(str, of_steps[:5]))}"
        where = f": {place}" if place else ""
        reasons.append(f"the gradient of {shown} is no combination of the recorded contributions{when}{where}")
    return reasons


def foreign(run: Run, data: StepData) -> list[str]:
    """Why nothing is known of an optimizer's gradients: it owns tensors that no forward has shown and that are no
    copies of parameters either, while parameters that got gradients belong to no optimizer."""
    ranks = set()
    num = 0
    for rank, events in data.events.items():
        steps = [event for event in events if isinstance(event, OptimizerStep)]
        owned = {param for event in steps for param in data.params_of(rank, event.params)}
        seen = {
            track.param.id
            for of_rank in data.tracks.values()
            if (track := of_rank.get(rank)) is not None and track.leaves
        }
        params = run.ranks[rank].params
        strange = sum(params[param].name.startswith("unnamed.") for param in owned - seen if param in params)
        if strange and seen - owned:
            ranks.add(rank)
            num = max(num, strange)
    if not ranks:
        return []
    return [
        f"the optimizer on rank(s) {', '.join(map(str, sorted(ranks)))} owns {num} tensor(s) that are neither "
        "parameters of the model nor copies of them as they were first seen: what it reads is not known"
    ]


def run_info(run: Run, contexts: list[StepContext], objective: str, objective_from: str) -> RunInfo:
    header = next(iter(run.ranks.values())).header
    dtypes = sorted({param.dtype for trace in run.ranks.values() for param in trace.params.values()})
    context = contexts[0] if contexts else None
    manifest = run.manifest
    return RunInfo(
        id=str(manifest.get("id") or run.path.resolve().name),
        command=list(manifest.get("command") or header.command),
        world_size=run.world_size,
        torch_version=header.torch_version,
        device_type=header.device_type,
        axes=context.axes if context else dict(header.axes or {}),
        axes_from=context.axes_from if context else "declared",
        data_ranks=context.contributions.ranks_of_coordinates() if context else [],
        data_ranks_from=context.contributions.coordinate_from if context else "declared",
        objective=objective,
        objective_from=objective_from,
        steps=[context.step for context in contexts],
        dtype=", ".join(dtypes),
        scenario=manifest.get("scenario"),
        variant=manifest.get("variant"),
    )


def overhead(run: Run) -> Overhead:
    ends = [event for trace in run.ranks.values() for event in trace.events if isinstance(event, StepEnd)]
    if not ends:
        return Overhead()
    probe = sum(event.probe_s for event in ends) / len(ends)
    duration = sum(event.duration_s for event in ends)
    return Overhead(
        probe_s_per_step=probe,
        share_of_step=probe * len(ends) / duration if duration else None,
        trace_bytes_per_step=sum(trace.num_bytes for trace in run.ranks.values()) / len(ends),
    )


def metrics(run: Run, steps: list[tuple[int, Contributions]]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name: loss (mean over all tokens), tokens, grad_norm (as the trainer's clipping saw it)."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    clips = {
        event.step: event.total_norm
        for trace in run.ranks.values()
        for event in trace.events
        if isinstance(event, Clip) and not event.partial
    }
    for step, contributions in steps:
        total = contributions.num_tokens
        if total:
            series["num_tokens"].append((step, float(total)))
            sums = [
                (c.value * (c.num_tokens or 0) if c.loss is not None and c.loss.reduction == "mean" else c.value)
                for c in contributions.by_key.values()
                if c.value is not None
            ]
            if len(sums) == len(contributions.by_key):
                series["loss"].append((step, sum(sums) / total))
        if step in clips:
            series["grad_norm"].append((step, clips[step]))
    for trace in run.ranks.values():
        for event in trace.events:
            if isinstance(event, Metric):
                series[event.name].append((event.step, event.value))
    return dict(series)
