"""Scalars by step and findings as text, into a TensorBoard log folder, beside what already lies there."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.tables import table
from gradcheck_dist.reports.text import printable
from gradcheck_dist.trace.run import Run

MAX_COORDINATES = 64


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Add one event file to the folder `output`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    output.mkdir(parents=True, exist_ok=True)
    before = set(output.iterdir())
    writer = EventFileWriter(str(output), filename_suffix=".gradcheck")
    for step, tag, value in _scalars(report, run):
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    body = TensorProto(dtype=DT_STRING, string_val=[markdown.render(report).encode()])
    value = Summary.Value(tag="gradcheck/findings", metadata=text, tensor=body)
    writer.add_event(Event(step=min(report.run.steps, default=0), summary=Summary(value=[value])))
    writer.close()
    return sorted(set(output.iterdir()) - before)


def _scalars(report: Report, run: Run | None) -> Iterator[tuple[int, str, float]]:
    for step, name, value in table("metrics", report, run).rows:
        if value is not None:
            yield step, f"gradcheck/{printable(name, 80)}", value
    first = min(run.ranks, default=0) if run is not None else 0
    for step, rank, _, before, _, coefficient, after, _ in table("norms", report, run).rows:
        if rank == first:
            yield step, "gradcheck/norm_before_clip", before
            yield step, "gradcheck/norm_after_clip", after
            yield step, "gradcheck/clip_coefficient", coefficient
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for weight in report.weights:
        if weight.ratio is None:
            continue
        key = weight.contribution
        groups[weight.step, "all"].append(weight.ratio)
        for axis, place in (("data_rank", key.data_rank), ("accumulation_step", key.accumulation_step)):
            if place < MAX_COORDINATES:
                groups[weight.step, f"{axis}/{place}"].append(weight.ratio)
    for (at, name), ratios in sorted(groups.items()):
        yield at, f"gradcheck/ratio/{name}", statistics.median(ratios)
