"""Running a scenario: folders, order, and what is left when a rank dies. No process is started here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_reports import finding, report, weight

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import SCHEMA_VERSION, Header, RunEnd
from gradcheck_dist.reports.document import variant_line
from gradcheck_dist.scenarios import runner
from gradcheck_dist.scenarios.jobs import Overrides
from gradcheck_dist.scenarios.schema import load
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.writer import TraceWriter, trace_path
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.result import StepMetrics, TrainResult

SCENARIO = load("ddp-accum")
RATIOS: dict[str, Callable[[int], float]] = {
    "averaging": lambda k: 0.5,
    "sum-every-backward": lambda k: 2.0 ** (2 - k),
    "fixed": lambda k: 1.0,
}


def write_traces(run_dir: str, config: TrainConfig) -> None:
    size = config.axes.world_size
    for rank in range(size):
        header = Header(
            schema_version=SCHEMA_VERSION, tool_version="", rank=rank, world_size=size, pid=1, started_unix_s=0.0
        )
        writer = TraceWriter(trace_path(run_dir, rank), header, background=False)
        writer.append(RunEnd(seq=0, t_ns=0, step=0))
        writer.close()


def judge_as_the_file_says(run: Run) -> Report:
    """Names the culprit that scenario files name, wherever the trainer's line stands today."""
    variant = run.manifest["variant"]
    weights = [weight(rank, k, RATIOS[variant](k)) for rank in (0, 1) for k in range(3)]
    expect = next(found.expect for found in SCENARIO.variants if found.name == variant)
    if not expect:
        return report([], weights)
    (expect,) = expect
    found = finding(code=expect.code, name=expect.name)
    assert found.first_event
    file = Path(runner.__file__).parents[2] / expect.culprit.file
    lines = file.read_text().splitlines()
    found.first_event.file = str(file)
    found.first_event.line = next(i for i, line in enumerate(lines, 1) if expect.culprit.line in line)
    return report([found], weights)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A launcher that writes empty traces, and an engine that is always right. Returns the launched folders."""
    launched: list[str] = []

    def launch(target: str, args: tuple[Any, ...], nproc: int, **options: Any) -> list[None]:
        run_dir, config, *_ = args
        launched.append(Path(run_dir).name)
        write_traces(run_dir, config)
        return [None] * nproc

    monkeypatch.setattr(runner, "launch", launch)
    monkeypatch.setattr(runner, "judge", judge_as_the_file_says)
    monkeypatch.setattr(runner.tempfile, "mkdtemp", lambda prefix: str(_made(tmp_path / "temporary")))
    return launched


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_all_variants_run_in_order_and_success_leaves_nothing_behind(started: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    result = runner.run_scenario(SCENARIO, on_progress=said.append)
    assert started == ["averaging", "sum-every-backward", "fixed"]
    assert [variant.mismatch for variant in result.report.variants] == ["", "", ""]
    assert (result.exit_code, result.run_dir, result.report.as_expected) == (0, None, True)
    assert not (tmp_path / "temporary").exists()
    assert all(variant.run_dir is None for variant in result.report.variants)
    assert any("sum-every-backward (2 of 3): training on 2 ranks" in line for line in said)


def test_keep_leaves_a_run_folder_a_variant_with_its_manifest(started: list[str], tmp_path: Path) -> None:
    result = runner.run_scenario(SCENARIO, Overrides(seed=7), keep=tmp_path / "kept", command=("gradcheck", "x"))
    assert result.run_dir == tmp_path / "kept"
    manifest = json.loads((tmp_path / "kept" / "averaging" / "manifest.json").read_text())
    assert manifest["scenario"] == "ddp-accum"
    assert manifest["command"] == ["gradcheck", "x"]
    assert manifest["axes"]["dp_replicate"] == 2
    assert TrainConfig.from_dict(manifest["config"]).seed == 7
    assert "expect" not in json.dumps(manifest)


def test_recorded_data_is_never_overwritten(started: list[str], tmp_path: Path) -> None:
    runner.run_scenario(SCENARIO, keep=tmp_path / "kept")
    started.clear()
    with pytest.raises(GradcheckError, match="averaging, sum-every-backward, fixed") as caught:
        runner.run_scenario(SCENARIO, keep=tmp_path / "kept")
    assert caught.value.code == "E511"
    assert started == []


def test_a_wrong_judgement_is_exit_code_1_and_keeps_the_runs(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "judge", lambda run: report([]))
    result = runner.run_scenario(SCENARIO)
    assert result.exit_code == 1
    assert [variant.as_expected for variant in result.report.variants] == [False, False, True]
    assert result.run_dir == tmp_path / "temporary"
    assert (tmp_path / "temporary" / "averaging" / "rank-00000.trace").exists()


def test_a_dead_rank_stops_the_scenario_and_keeps_what_was_recorded(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = runner.launch

    def launch(target: str, args: tuple[Any, ...], nproc: int, **options: Any) -> list[None]:
        healthy(target, args, nproc, **options)
        if Path(args[0]).name == "sum-every-backward":
            raise GradcheckError("rank 1 of 2 was killed by SIGKILL", code="E232")
        return [None] * nproc

    monkeypatch.setattr(runner, "launch", launch)
    result = runner.run_scenario(SCENARIO)
    assert result.exit_code == 2
    assert result.error
    assert "rank 1 of 2 was killed" in str(result.error)
    assert f"kept in {tmp_path / 'temporary' / 'sum-every-backward'} (rank 0: 1 events" in str(result.error)
    assert [variant.report is None for variant in result.report.variants] == [False, True]
    assert "fixed" not in started


def test_a_bug_of_torch_that_is_mended_elsewhere_is_told_and_no_failure(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torch = dataclasses.replace(SCENARIO, torch=("2.12",))
    mended = report([], [weight(rank, k, 1.0) for rank in (0, 1) for k in range(3)])
    mended.run.torch_version = "2.13.0+cpu"
    monkeypatch.setattr(runner, "judge", lambda run: mended)
    result = runner.run_scenario(of_torch)
    assert result.exit_code == 0
    assert result.report.variants[0].mismatch == "not reproduced here: torch 2.13.0, seen on 2.12"
    assert result.report.variants[-1].mismatch == ""
    assert (
        variant_line(result.report.variants[0]) == "averaging: clean (not reproduced here: torch 2.13.0, seen on 2.12)"
    )
    mended.run.torch_version = "2.12.1"
    assert runner.run_scenario(of_torch).exit_code == 1


def test_costs_are_told_a_variant(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.run_scenario(SCENARIO)
    assert len(result.costs) == 3
    assert all(cost.seconds > 0 and cost.peak_memory_bytes is None for cost in result.costs)
    steps = [StepMetrics(0, 1.0, 1.0, 1, 0.1, 1.0, peak_memory_bytes=5)]
    ranks = [TrainResult(rank, 2, "cpu", 0, steps) for rank in range(2)]
    assert runner.peak_memory_bytes(ranks) == 10
    assert runner.peak_memory_bytes([ranks[0], None]) is None


def test_an_impossible_size_is_refused_before_anything_starts(started: list[str], tmp_path: Path) -> None:
    with pytest.raises(GradcheckError):
        runner.run_scenario(SCENARIO, Overrides(nproc=0), keep=tmp_path / "kept")
    assert started == []
    assert not (tmp_path / "kept").exists()
