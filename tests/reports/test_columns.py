"""Steps that stand in columns only: every reader of a run folder judges them as `gradcheck diagnose` does."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from column_runs import one_wrong
from typer.testing import CliRunner

import gradcheck_dist
from gradcheck_dist.cli.main import build
from gradcheck_dist.compare.sources import read
from gradcheck_dist.reports.formats import MODULES
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run


@pytest.fixture(scope="module", params=[None, 4], ids=["columns alone", "beside a sampled step"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_wrong(tmp_path_factory.mktemp("runs") / "run", samples_of=request.param)


def command(*words: str | Path) -> str:
    result = CliRunner().invoke(build(str(words[0])), [str(word) for word in words[1:]])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("form", sorted(MODULES))
def test_a_finding_that_stands_in_columns_only_is_in_every_format(folder: Path, form: str) -> None:
    text = command("report", folder, "--format", form)
    assert "GS000" in text
    assert "train.py" in text
    assert "CLEAN" not in text


@pytest.mark.parametrize("form", ["csv", "tensorboard"])
def test_exports_hold_it_and_the_curves_of_all_steps(folder: Path, tmp_path: Path, form: str) -> None:
    command("export", folder, "--format", form, "-o", tmp_path / form)
    if form == "csv":
        with open(tmp_path / form / "findings.csv", encoding="utf-8", newline="") as file:
            assert [row["code"] for row in csv.DictReader(file)] == ["GS000"]
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        log = EventAccumulator(str(tmp_path / form)).Reload()
        assert [event.step for event in log.Scalars("gradcheck/num_tokens")] == list(range(12))
        assert b"GS000" in log.Tensors("gradcheck/findings")[0].tensor_proto.string_val[0]


def test_a_notebook_and_a_script_see_it_too(folder: Path) -> None:
    expected = diagnose_run(folder)
    loaded = gradcheck_dist.load(folder)
    assert loaded.report == expected == gradcheck_dist.diagnose(read_run(folder))
    assert "FOUND GS000" in loaded._repr_html_()
    assert loaded.metrics()["step"].to_list() == list(range(12))
    assert set(read(folder, {}).curves["tokens"]) == set(range(12))


def test_what_was_found_has_not_passed_and_what_was_compared_is_no_problem(folder: Path) -> None:
    report = json.loads(command("report", folder, "--format", "json"))
    assert report["rules"]["failed"] == ["GS000"]
    assert "GS000" not in report["rules"]["passed"]
    assert report["coverage"]["problems"] == []
    assert any("recorded without samples" in note for note in report["coverage"]["notes"])
