"""Who ran what, what recording cost, and the curves of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from gradcheck_dist.diagnosis.finding import Overhead, RunInfo
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.events import Clip, Metric, StepEnd
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.trace.run import Run


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
        axes=context.axes if context else run.axes.as_dict() if run.axes else {},
        axes_from=context.mesh.rests_on if context else "declared",
        axes_in_order=context.mesh.in_order if context else True,
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


def metrics(
    run: Run, steps: list[tuple[int, Contributions]], norms: Mapping[int, float]
) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name: loss (mean over all tokens), tokens, grad_norm (as the first rank's clipping saw it, in a
    step without any out of `norms`, the recorded ones)."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    clips = dict(norms) | {
        event.step: event.total_norm
        for _, trace in sorted(run.ranks.items(), reverse=True)
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
