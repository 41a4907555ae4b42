"""Tables, timeline and scalars for other programs."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hostile import hostile_report
from sample_reports import finding, report, weight
from tiny_runs import write_run

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report, RunInfo
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports import exports, heatmap
from gradcheck_dist.reports.along import mesh_places
from gradcheck_dist.reports.figures import ratio_figure, weights_figure
from gradcheck_dist.reports.tables import COLUMNS, table
from gradcheck_dist.reports.timeline import timeline_figure
from gradcheck_dist.trace.run import Run, read_run

Judged = tuple[Report, Run]


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_holds_every_table_and_tells_what_its_columns_are(faulty: Judged, tmp_path: Path) -> None:
    written = exports.write(*faulty, "csv", tmp_path / "out")
    assert {path.name for path in written} == {f"{name}.csv" for name in COLUMNS} | {"columns.csv"}
    weights = rows_of(tmp_path / "out" / "weights.csv")
    assert len(weights) == len(faulty[0].weights)
    assert float(weights[0]["ratio"]) == pytest.approx(0.5)
    described = rows_of(tmp_path / "out" / "columns.csv")
    assert {"table": "weights", "column": "observed", "kind": "float", "unit": "1/tokens"}.items() <= next(
        row for row in described if row["column"] == "observed"
    ).items()
    assert len(described) == sum(map(len, COLUMNS.values()))


def test_hostile_names_are_no_formulas_and_no_lines_of_csv(tmp_path: Path) -> None:
    bad = hostile_report()
    bad.findings.append(finding(name="=HYPERLINK('https://evil.example')", fix="+1", explanation="@x"))
    exports.write(bad, None, "csv", tmp_path / "out")
    findings = rows_of(tmp_path / "out" / "findings.csv")
    assert len(findings) == 2
    for row in findings:
        assert not any(value.startswith(("=", "+", "-", "@", "\t")) for value in row.values())
        assert not any("\x1b" in value or "\n" in value for value in row.values())


def test_parquet_keeps_types_and_units(faulty: Judged, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    exports.write(*faulty, "parquet", tmp_path / "out")
    found = parquet.read_table(tmp_path / "out" / "weights.parquet")
    assert found.num_rows == len(faulty[0].weights)
    assert str(found.schema.field("ratio").type) == "double"
    assert found.schema.field("observed").metadata[b"unit"] == b"1/tokens"
    exports.write(hostile_report(), None, "parquet", tmp_path / "hostile")


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_without_a_tracker_s_package_the_way_out_is_told(
    faulty: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(GradcheckError, match=f"pip install {package}.*--format tensorboard"):
        exports.write(*faulty, package, tmp_path / "out")


def test_a_run_of_mlflow_holds_ratios_axes_and_the_report(faulty: Judged, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    judged = msgspec.structs.replace(
        faulty[0], metrics={"loss": [1.0] * 1500}, metric_steps={"loss": list(range(1500))}
    )
    exports.write(judged, faulty[1], "mlflow", tmp_path)
    database = tmp_path / "mlflow.db"
    client = mlflow.MlflowClient(f"sqlite:///{database}" if database.exists() else tmp_path.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("gradcheck").experiment_id])
    assert run.data.metrics["gradcheck/ratio/all"] == pytest.approx(0.5)
    assert run.data.params["dp_replicate"] == "2"
    assert len(client.get_metric_history(run.info.run_id, "gradcheck/loss")) == 1500
    assert "GS101" in mlflow.artifacts.load_text(f"{run.info.artifact_uri}/gradcheck.md")


def test_a_run_of_wandb_is_written_offline(faulty: Judged, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (folder,) = exports.write(*faulty, "wandb", tmp_path)
    assert folder.is_relative_to(tmp_path)
    assert list(folder.glob("*.wandb"))


def test_without_pyarrow_the_way_out_is_told(faulty: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(GradcheckError, match=r"gradcheck-dist\[parquet\].*--format csv"):
        exports.write(*faulty, "parquet", tmp_path / "out")


def test_perfetto_has_a_process_a_rank_with_named_lanes_and_marks_the_culprit(faulty: Judged, tmp_path: Path) -> None:
    (path,) = exports.write(*faulty, "perfetto", tmp_path / "trace.json")
    content = json.loads(path.read_text())
    entries = content["traceEvents"]
    names = {entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    lanes = {entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert {"step", "backward", "reduce", "loss"} <= lanes
    as_the_format_asks(entries)
    backward = [entry for entry in entries if entry["name"].startswith("backward")]
    assert len(backward) == 2 * 2 * 3
    culprits = [entry["name"] for entry in entries if entry.get("cat") == "culprit"]
    assert len(culprits) == 1
    assert culprits[0].endswith("<- GS101")


def test_a_culprit_of_another_kind_has_a_place_in_time(tmp_path: Path) -> None:
    """An exchange of activations is on no timeline, unless a finding points at it."""
    run = read_run(write_run(tmp_path / "run", fault=None, exchanged=True))
    found = diagnose(run)
    (path,) = exports.write(found, run, "perfetto", tmp_path / "trace.json")
    entries = json.loads(path.read_text())["traceEvents"]
    as_the_format_asks(entries)
    exchanges = [entry for entry in entries if entry["name"].startswith("exchange")]
    assert [entry["cat"] for entry in exchanges] == ["culprit"]
    figure = timeline_figure(found, run)
    assert figure is not None
    assert "exchange k=0" in next(one for one in figure.spec["data"] if one["name"] == "culprit")["text"][0]


def as_the_format_asks(entries: list[dict[str, Any]]) -> None:
    """What the description of the Chrome trace event format asks for, and Perfetto's importer of it: microseconds from
    0 up, every lane named by metadata before its first event, durations of one lane beside or inside one another."""
    named: set[tuple[int, int]] = set()
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in entries:
        assert entry["ph"] in ("M", "X", "i")
        assert isinstance(entry["name"], str)
        assert isinstance(entry["pid"], int)
        if entry["ph"] == "M":
            assert entry["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            (value,) = entry["args"].values()
            assert isinstance(value, int if entry["name"].endswith("index") else str)
            if entry["name"] == "thread_name":
                named.add((entry["pid"], entry["tid"]))
            continue
        lane = (entry["pid"], entry["tid"])
        assert lane in named
        assert math.isfinite(entry["ts"])
        assert entry["ts"] >= 0
        assert isinstance(entry["cat"], str)
        if entry["ph"] == "i":
            assert entry["s"] in ("g", "p", "t")
        else:
            assert entry["dur"] > 0
            lanes.setdefault(lane, []).append((entry["ts"], entry["ts"] + entry["dur"]))
    assert lanes
    for slices in lanes.values():
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= start + 1e-3:  # a nanosecond
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)


def test_a_timeline_needs_the_run(tmp_path: Path) -> None:
    with pytest.raises(GradcheckError, match="not a JSON report"):
        exports.write(report(), None, "perfetto", tmp_path / "trace.json")
    without_events = Run(path=tmp_path, manifest={}, ranks={})
    with pytest.raises(GradcheckError, match="--steps 0:3"):
        exports.write(report(), without_events, "perfetto", tmp_path / "trace.json")


def test_tensorboard_reads_scalars_and_findings_and_keeps_what_was_there(faulty: Judged, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    exports.write(*faulty, "tensorboard", tmp_path)
    exports.write(*faulty, "tensorboard", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    log = EventAccumulator(str(next(tmp_path.iterdir())))
    log.Reload()
    tags = log.Tags()
    assert [event.value for event in log.Scalars("gradcheck/ratio/all")] == pytest.approx([0.5, 0.5])
    assert all(event.wall_time == pytest.approx(time.time(), abs=600) for event in log.Scalars("gradcheck/ratio/all"))
    assert {"gradcheck/loss", "gradcheck/norm_after_clip", "gradcheck/ratio/data_rank/1"} <= set(tags["scalars"])
    assert b"GS101" in log.Tensors("gradcheck/findings")[0].tensor_proto.string_val[0]


def test_tensorboard_has_the_ratio_along_every_axis_by_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cells = [weight(0, 0, 0.5 if rank >= 4 else 1.0, holder=rank) for rank in range(8)]
    judged = report(weights=[*cells, *(msgspec.structs.replace(one, step=1, ratio=1.0) for one in cells)])
    judged.run.axes, judged.run.world_size = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}, 8
    exports.write(judged, None, "tensorboard", tmp_path)
    log = EventAccumulator(str(tmp_path)).Reload()
    seen = {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    assert seen["gradcheck/ratio/dp_replicate/0"] == [(0, 1.0), (1, 1.0)]
    assert seen["gradcheck/ratio/dp_replicate/1"] == [(0, 0.5), (1, 1.0)]
    for axis in ("dp_shard", "tp", "ep"):
        assert [seen[f"gradcheck/ratio/{axis}/{place}"] for place in (0, 1)] == [[(0, 0.75), (1, 1.0)]] * 2
    figure = ratio_figure(judged)
    assert figure
    assert {"dp_replicate", "dp_shard", "tp", "ep", "step"} <= {trace["name"] for trace in figure.spec["data"]}


def test_tensorboard_shows_the_weights_as_an_image_a_step(faulty: Judged, tmp_path: Path) -> None:
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    exports.write(*faulty, "tensorboard", tmp_path)
    images = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload().Images("gradcheck/weights")
    assert [image.step for image in images] == [0, 1]
    picture = Image.open(io.BytesIO(images[0].encoded_image_string))
    assert picture.size == (images[0].width, images[0].height)
    assert heatmap._BLUE in {colour for _, colour in picture.getcolors(1 << 20)}  # half of what it should be: blue
    hostile = weights_figure(hostile_report())
    assert hostile
    assert heatmap.png(hostile)[1] < 4000


def test_tensorboard_has_axes_as_hparams_and_findings_as_text(faulty: Judged, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    exports.write(*faulty, "tensorboard", tmp_path)
    log = EventAccumulator(str(tmp_path)).Reload()
    started = metadata.parse_session_start_info_plugin_data(
        log.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    )
    told = {name: value.number_value or value.string_value for name, value in started.hparams.items()}
    assert told["dp_replicate"] == 2
    assert (told["objective"], told["verdict"], told["findings"]) == ("global-token-mean", "findings", "GS101")
    (text,) = log.Tensors("gradcheck/findings")
    assert log.SummaryMetadata("gradcheck/findings").plugin_data.plugin_name == "text"
    assert "double-averaging" in text.tensor_proto.string_val[0].decode()


def test_an_unknown_format_is_refused(faulty: Judged, tmp_path: Path) -> None:
    with pytest.raises(GradcheckError, match="parquet"):
        exports.write(*faulty, "parket", tmp_path)


def test_a_report_alone_has_no_events() -> None:
    assert table("events", report(), None).rows == []
    assert len(table("findings", report(), None).rows) == 1


def test_expert_ranks_are_counted_over_shards_and_context_parallel_ranks_together() -> None:
    axes = {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 1, "pp": 1, "ep": 4}
    weights = [weight(0, 0, 1.0, holder=rank) for rank in range(4)]
    places = mesh_places(report([], weights, run=RunInfo(id="r", world_size=4, axes=axes, objective="sum")))
    assert [places["ep"](one) for one in weights] == [0, 1, 2, 3]
    assert [places["cp"](one) for one in weights] == [0, 1, 0, 1]
    assert set(places) == {"dp_shard", "cp", "ep"}
