"""gradcheck_dist.load: what a notebook shows and gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hostile import ATTACK
from small_runs import write_run

import gradcheck_dist
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.notebook import LoadedRun
from gradcheck_dist.reports import json_report
from gradcheck_dist.reports.tables import COLUMNS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "faulty")


@pytest.fixture(scope="module")
def run(folder: Path) -> LoadedRun:
    return gradcheck_dist.load(folder)


def test_the_display_begins_with_the_verdict(run: LoadedRun) -> None:
    page = run._repr_html_()
    assert page.index("FOUND GS101") < page.index("<b>Why</b>") < page.index("<b>Next</b>") < page.index("<table")
    assert "verdict  FOUND GS101" in repr(run).splitlines()[1]
    assert run.verdict == "findings"


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_every_table_is_a_frame_with_the_stated_columns_and_units(run: LoadedRun, name: str) -> None:
    frame = run.findings if name == "findings" else getattr(run, name)()
    assert list(frame.columns) == [column.name for column in run.columns(name)]
    assert frame.attrs["units"] == {column.name: column.unit for column in run.columns(name) if column.unit}
    assert len(frame) > 0
    assert all(column.meaning for column in run.columns(name))


def test_frames_hold_what_was_recorded(run: LoadedRun) -> None:
    weights = run.weights()
    assert weights["ratio"].to_list() == pytest.approx([0.5] * 24)
    assert weights.groupby("step")["num_tokens"].sum().to_list() == [2 * 222, 2 * 223]
    assert run.tokens()["num_tokens"].sum() == 222 + 223
    norms = run.norms()
    assert (norms["norm_after_clip"] == norms["norm_before_clip"] * norms["coefficient"]).all()
    assert list(norms["rank"]) == [0, 0, 1, 1]
    assert set(run.events()["kind"]) >= {"loss", "backward", "reduce", "optimizer_step"}
    assert run.findings.loc[0, "line"] == 9


@pytest.mark.parametrize("name", ["weights", "timeline", "norms", "ratio"])
def test_figures_are_plotly_figures(run: LoadedRun, name: str) -> None:
    figure = getattr(run.figure, name)()
    assert type(figure).__module__.startswith("plotly.graph_objs")
    assert figure.data


def test_a_figure_without_data_says_why(tmp_path: Path) -> None:
    one = gradcheck_dist.load(write_run(tmp_path / "run", steps=1))
    with pytest.raises(GradcheckError, match="fewer than two steps") as caught:
        one.figure.norms()
    assert caught.value.code == "E905"


def test_explain_shows_the_page_of_what_was_found(run: LoadedRun) -> None:
    page = run.explain()
    assert repr(page).startswith("# GS101 double-averaging")
    assert page._repr_markdown_() == repr(run.explain("double-averaging"))
    with pytest.raises(GradcheckError, match="GS101"):
        run.explain("GS110")


def test_a_json_report_is_loaded_too_and_has_no_events(run: LoadedRun, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_bytes(json_report.encode(run.report))
    loaded = gradcheck_dist.load(file)
    assert loaded.report == run.report
    assert len(loaded.weights()) == 24
    with pytest.raises(GradcheckError, match="holds no events"):
        loaded.events()


def test_hostile_names_are_inert_in_a_notebook(tmp_path: Path) -> None:
    hostile = gradcheck_dist.load(write_run(tmp_path / "run", name=ATTACK.replace("\ud800", "")))
    page = hostile._repr_html_()
    assert "<img" not in page
    assert "<script" not in page


def test_pandas_and_plotly_load_when_they_are_needed(folder: Path) -> None:
    code = (
        "import sys, gradcheck_dist; run = gradcheck_dist.load(sys.argv[1]); repr(run); run._repr_html_()\n"
        "assert not {'pandas', 'plotly', 'torch'} & set(sys.modules)\n"
        "run.weights(); assert 'pandas' in sys.modules and 'plotly' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)
