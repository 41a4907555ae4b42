"""A run judged step by step gives the report of a run read whole, and holds no more than a few steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from small_runs import write_run

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.judged_alone import judge_alone
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream import cursor, workers
from gradcheck_dist.stream import diagnose as stream
from gradcheck_dist.stream.diagnose import Progress, diagnose_run
from gradcheck_dist.trace.run import Run, read_run


def as_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report)).decode()


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("harm", ["none", "cut", "flipped", "missing", "no header"])
def test_the_report_is_that_of_the_whole_run(
    op: str, harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", op=op, steps=6, flush_steps=True)
    second = run / "rank-00001.trace"
    if harm == "cut":
        cut(second, 700)
    elif harm == "flipped":
        flip(second, second.stat().st_size // 2)
    elif harm == "missing":
        second.unlink()
    elif harm == "no header":
        second.write_bytes(b"")
    monkeypatch.setattr(cursor, "MAX_READ_BYTES", 100)  # far less than a frame
    monkeypatch.setattr(cursor, "MIN_READ_BYTES", 1)
    assert as_json(diagnose_run(run)) == as_json(diagnose(read_run(run)))


@pytest.mark.parametrize(("setting", "value"), [("POOL_FROM_S", 0.0), ("POOL_FROM_ROWS", 0)])
def test_other_processes_change_nothing(
    setting: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=5, flush_steps=True)
    monkeypatch.setattr(workers, setting, value)
    assert as_json(diagnose_run(run, jobs=2)) == as_json(diagnose(read_run(run)))


@pytest.mark.parametrize("num_steps", [1, 3])
def test_large_steps_are_judged_side_by_side_from_the_first_one_on(
    num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=num_steps, flush_steps=True)
    here: list[int] = []

    def judge_here(part: Run, step: int, *rest: str) -> StepVerdict:
        here.append(step)
        return judge_alone(part, step, *rest)

    class Pool(ThreadPoolExecutor):
        def __init__(self, jobs: int, context: object) -> None:
            super().__init__(jobs)
            here.append(-1)

    monkeypatch.setattr(workers, "judge_alone", judge_here)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(workers, "POOL_FROM_ROWS", 1)
    diagnose_run(run, jobs=2)
    assert here[0] == (-1 if num_steps > 1 else 0)
    assert sorted(here) == list(range(-1 if num_steps > 1 else 0, num_steps))


def test_chosen_steps_and_unknown_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=5)
    assert as_json(diagnose_run(run, steps=range(1, 3))) == as_json(diagnose(read_run(run), steps=range(1, 3)))
    with pytest.raises(GradcheckError, match="recorded: steps 0 to 4") as error:
        diagnose_run(run, steps=[7])
    assert error.value.code == "E402"


def test_steps_as_text_without_an_end_and_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=5)
    for run in (folder, read_run(folder)):
        assert gradcheck_dist.diagnose(run, steps="3:").run.steps == [3, 4]
        assert gradcheck_dist.diagnose(run, steps=range(4, 10**15)).run.steps == [4]
    for open_run in (gradcheck_dist.diagnose, gradcheck_dist.load):
        with pytest.raises(GradcheckError, match="steps is 3; legal values are a range") as error:
            open_run(folder, steps=3)
        assert error.value.code == "E712"


def test_it_stops_at_the_first_finding_and_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20, flush_steps=True)
    told: list[Progress] = []
    report = diagnose_run(run, first=True, progress=told.append)
    assert report.verdict == "findings"
    assert report.run.steps == [0]
    assert [done.num_judged for done in told] == [1]
    assert any("stopped at the first step" in problem for problem in report.coverage.problems)


def test_a_step_is_forgotten_when_it_has_been_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", steps=30, flush_steps=True)
    monkeypatch.setattr(cursor, "MAX_READ_BYTES", 4096)
    monkeypatch.setattr(cursor, "MIN_READ_BYTES", 1)
    reader = cursor.RunCursor(run)
    most = 0
    for step, part in reader.steps():
        assert {sample.step for trace in part.ranks.values() for sample in trace.samples} == {step}
        most = max(most, *(len(of_rank._steps) for of_rank in reader._cursors.values()))
    assert step == 29
    assert most <= 6


def test_weights_beyond_the_limit_are_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", op="sum", steps=5)
    monkeypatch.setattr(stream, "MAX_WEIGHTS", 13)  # six a step
    report = diagnose_run(run)
    assert report.verdict == "clean"
    assert {weight.step for weight in report.weights} == {0}
    assert "the weights of 4 steps without findings are not listed" in report.coverage.problems
