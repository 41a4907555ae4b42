"""Scalars by step, weights as images, findings as text, the mesh as hparams: into a TensorBoard log folder, beside what
lies there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.exports.scalars import facts, scalars
from gradcheck_dist.reports.figures import weights_figure
from gradcheck_dist.reports.heatmap import png
from gradcheck_dist.trace.run import Run

MAX_PICTURES = 20


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Add one event file to the folder `output`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.hparams import summary_v2 as hparams
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    output.mkdir(parents=True, exist_ok=True)
    before, now = set(output.iterdir()), time.time()
    writer = EventFileWriter(str(output), filename_suffix=".gradcheck")

    def add(step: int, summary: Summary) -> None:
        writer.add_event(Event(wall_time=now, step=step, summary=summary))

    for step, tag, number in scalars(report, run):
        add(step, Summary(value=[Summary.Value(tag=tag, simple_value=number)]))
    for step, (picture, width, height) in _pictures(report):
        image = Summary.Image(encoded_image_string=picture, width=width, height=height, colorspace=3)
        add(step, Summary(value=[Summary.Value(tag="gradcheck/weights", image=image)]))
    text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    body = TensorProto(dtype=DT_STRING, string_val=[markdown.render(report).encode()])
    words = Summary.Value(tag="gradcheck/findings", metadata=text, tensor=body)
    add(min(report.run.steps, default=0), Summary(value=[words]))
    add(0, hparams.hparams_pb(facts(report), trial_id=report.run.id))
    writer.close()
    return sorted(set(output.iterdir()) - before)


def _pictures(report: Report) -> Iterator[tuple[int, tuple[bytes, int, int]]]:
    """The map of weights of up to MAX_PICTURES steps, those with findings first."""
    steps = sorted({weight.step for weight in report.weights})
    faulty = {finding.step for finding in report.findings}
    for step in sorted(sorted(steps, key=lambda step: step not in faulty)[:MAX_PICTURES]):
        figure = weights_figure(report, step)
        if figure is not None:
            yield step, png(figure)
