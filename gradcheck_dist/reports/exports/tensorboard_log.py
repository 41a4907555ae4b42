"""Scalars by step, findings as text and the mesh as hparams, into a TensorBoard log folder beside what lies there."""

from __future__ import annotations

from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.exports.scalars import facts, scalars
from gradcheck_dist.trace.run import Run


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Add one event file to the folder `output`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.hparams import summary_v2 as hparams
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    output.mkdir(parents=True, exist_ok=True)
    before = set(output.iterdir())
    writer = EventFileWriter(str(output), filename_suffix=".gradcheck")
    for step, tag, value in scalars(report, run):
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    body = TensorProto(dtype=DT_STRING, string_val=[markdown.render(report).encode()])
    value = Summary.Value(tag="gradcheck/findings", metadata=text, tensor=body)
    writer.add_event(Event(step=min(report.run.steps, default=0), summary=Summary(value=[value])))
    writer.add_event(Event(summary=hparams.hparams_pb(facts(report), trial_id=report.run.id)))
    writer.close()
    return sorted(set(output.iterdir()) - before)
