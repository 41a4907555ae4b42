"""The page without a browser: what is in it, what size it has, and figures that plotly accepts."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hostile import ATTACK, hostile_report
from sample_reports import report, weight
from small_runs import write_run
from typer.testing import CliRunner

from gradcheck_dist.cli.main import build
from gradcheck_dist.diagnosis.finding import Report, RunInfo
from gradcheck_dist.events import Backward
from gradcheck_dist.reports import figures, formats, html_report, json_report, timeline
from gradcheck_dist.reports.figure import label
from gradcheck_dist.trace.run import Run, read_run

NUM_RANKS, NUM_STEPS = 1024, 10


def large_report() -> Report:
    """1024 ranks x 10 steps, eight contributions each."""
    weights = []
    for step in range(NUM_STEPS):
        for rank in range(NUM_RANKS):
            for k in range(8):
                one = weight(rank, k, 0.5, holder=rank)
                one.step = step
                weights.append(one)
    made = report(weights=weights)
    made.run = RunInfo(
        id="large",
        world_size=NUM_RANKS,
        axes={"dp_replicate": 8, "dp_shard": 16, "tp": 8},
        objective="global-token-mean",
        steps=list(range(NUM_STEPS)),
    )
    made.metrics = {name: [1.0 + step for step in range(NUM_STEPS)] for name in ("loss", "grad_norm", "num_tokens")}
    return made


def test_a_page_is_one_file_that_names_no_other(faulty: tuple[Report, Run]) -> None:
    text = html_report.render(*faulty)
    without_data = re.sub(r"<script\b.*?</script>", "", text, flags=re.S)
    assert not re.search(r"\b(src|href)=", without_data)
    assert "url(" not in without_data
    assert "default-src 'none'" in text
    assert len(text.encode()) < 8_000_000


def test_the_verdict_comes_before_any_figure(faulty: tuple[Report, Run]) -> None:
    text = html_report.render(*faulty)
    assert text.index("FOUND GS101") < text.index('class="plot"') < text.index("<table")


def test_a_report_without_its_run_lacks_the_timeline_only(faulty: tuple[Report, Run]) -> None:
    with_run = {figure.name for figure in html_report.report_figures(*faulty)}
    without = {figure.name for figure in html_report.report_figures(faulty[0], None)}
    assert with_run - without == {"timeline"}
    assert without == {"weights", "norms", "ratio"}


def test_plotly_accepts_every_figure(faulty: tuple[Report, Run]) -> None:
    for judged, run in (faulty, (hostile_report(), None), (large_report(), None)):
        for figure in html_report.report_figures(judged, run):
            go.Figure(figure.spec)
            json.dumps(figure.spec, allow_nan=False)


def test_a_run_that_diverged_is_drawn_with_gaps() -> None:
    judged = report()
    judged.metrics = {"loss": [1.0, math.nan, math.inf], "grad_norm": [math.nan] * 3}
    judged.weights[0].ratio = math.nan
    for form in formats.MODULES:
        assert "double-averaging" in formats.write(judged, form)
    again = json_report.decode(json_report.encode(judged))
    assert isinstance(again, Report)
    assert again.metrics == {"loss": [1.0, None, None], "grad_norm": [None] * 3}


def test_the_culprit_is_marked_in_the_timeline(faulty: tuple[Report, Run]) -> None:
    figure = timeline.timeline_figure(*faulty)
    assert figure
    marked = [trace for trace in figure.spec["data"] if trace["name"] == "culprit"]
    assert len(marked) == 1
    assert marked[0]["text"] == ["reduce ddp avg over 2 ranks k=2 m=0"]


def test_a_timeline_s_bars_end_where_backward_ended_and_events_left_out_are_counted(
    faulty: tuple[Report, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    report, run = faulty
    passes = [event for event in run.ranks[0].events if isinstance(event, Backward) and event.step == 0]
    spans = [span for span in timeline.spans(run, 0) if span.kind == "backward" and span.rank == 0]
    assert [span.start_ns + span.duration_ns for span in spans] == [event.t_ns for event in passes]
    assert all(span.duration_ns > 0 for span in spans)
    whole = timeline.timeline_figure(report, run)
    monkeypatch.setattr(timeline, "MAX_SPANS", 5)
    part = timeline.timeline_figure(report, run)
    assert whole and part and "events are shown" not in whole.note
    shown, found = map(int, re.findall(r"(\d+) of (\d+) events are shown", part.note)[0])
    assert shown <= 5 < found


def test_labels_of_figures_hold_no_tags() -> None:
    assert "<" not in label(ATTACK)
    text = json.dumps([figure.spec for figure in html_report.report_figures(hostile_report(), None)])
    assert "<img" not in text
    assert "<a " not in text


def test_many_ranks_are_reduced_and_the_reduction_is_stated() -> None:
    figure = figures.weights_figure(large_report())
    assert figure
    assert "1024 holders" in figure.note
    assert "farthest off" in figure.note
    heat = figure.spec["data"][0]
    assert len(heat["z"]) <= figures.MAX_ROWS
    assert len(heat["z"][0]) <= figures.MAX_COLUMNS
    ratio = figures.ratio_figure(large_report())
    assert ratio
    assert "data rank (1024 to" in ratio.note


def test_the_one_weight_that_is_off_survives_the_reduction() -> None:
    judged = large_report()
    for one in judged.weights:
        one.ratio = 1.0
    judged.weights[5003].ratio = 4.0
    figure = figures.weights_figure(judged)
    assert figure
    assert max(value for row in figure.spec["data"][0]["z"] for value in row if value is not None) == 2.0


@pytest.mark.parametrize("form", sorted(formats.MODULES))
def test_a_thousand_ranks_and_ten_steps_are_written_in_time_and_size(form: str) -> None:
    judged = large_report()
    started = time.perf_counter()
    text = formats.write(judged, form)
    assert time.perf_counter() - started < 5
    if form != "json":
        assert len(text.encode()) < 8_000_000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process's memory is read from there")
def test_a_report_of_that_size_stays_below_200_mib(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(json_report.encode(large_report()))
    code = (
        "import sys\nfrom gradcheck_dist.cli.main import run\n"
        "try:\n    run(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(open('/proc/self/status').read())"
    )
    words = [sys.executable, "-c", code, "report", str(file), "-o", str(tmp_path / "report.html")]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    peak = re.search(r"VmHWM:\s+(\d+) kB", told)
    assert peak
    assert int(peak[1]) / 1024 < 200


def test_a_timeline_of_a_page_reads_the_events_of_the_ranks_that_it_shows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ranks=20, steps=1)
    page = tmp_path / "page.html"
    assert CliRunner().invoke(build("report"), [str(folder), "-o", str(page)]).exit_code == 0
    assert re.search(r"1\d of 20 ranks are shown", page.read_text())
    some = read_run(folder, ranks=[3], samples=False)
    whole = read_run(folder)
    assert list(some.ranks) == [3]
    assert some.ranks[3].events == whole.ranks[3].events
    assert (some.ranks[3].samples, len(whole.ranks[3].samples) > 0) == ([], True)


def test_the_assets_are_shipped_beside_the_code() -> None:
    folder = Path(html_report.__file__).parent / "assets"
    assert {file.name for file in folder.iterdir()} == {"report.css", "report.js"}


def test_a_weight_of_nothing_leaves_colours_for_the_others_and_steps_are_whole_numbers() -> None:
    weights = [weight(0, 0, 0.0), weight(0, 1, 2.0), weight(0, 2, 1.0)]
    made = report([], weights, metrics={"loss": [2.0, 1.0, 0.5]})
    heat, norms = figures.weights_figure(made), figures.norms_figure(made)
    assert heat is not None and norms is not None
    assert (heat.spec["data"][0]["zmin"], heat.spec["data"][0]["zmax"]) == (-1.0, 1.0)
    assert norms.spec["layout"]["xaxis"]["dtick"] == 1
