"""Steps that are known by the place of their records are judged as those that are read, byte for byte."""

from __future__ import annotations

import pickle
from collections import deque
from pathlib import Path

import msgspec
import pytest
from recorded_runs import RUNS

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream import cursor
from gradcheck_dist.stream.cursor import RunCursor
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.stream.placed import Listening, ToldRun, batches, judge_batch, parts, tell
from gradcheck_dist.stream.workers import Processes, Verdicts, Wanted, Workers
from gradcheck_dist.trace.store import Place, Where


def in_two_shares(files: dict[int, Place], read_bytes: int) -> Listening:
    shares = {share: tell({rank: files[rank] for rank in sorted(files)[share::2]}, read_bytes) for share in range(2)}
    while told := {share: answer for share, of in shares.items() if (answer := next(of, None)) is not None}:
        yield told


class Apart(Processes):
    """Does in one process what a cluster does: places from two readers, judged in batches."""

    def open(self, path: Where) -> RunCursor:
        return ToldRun(path, in_two_shares)

    def judge(self, cursor: RunCursor, wanted: Wanted, objective: str, objective_from: str) -> Verdicts:
        assert isinstance(cursor, ToldRun)
        waiting: deque[list[StepVerdict]] = deque()
        for ground, steps in batches(cursor, wanted):
            ground = pickle.loads(pickle.dumps(ground))
            waiting.append(judge_batch(ground, steps, objective, objective_from))
            if len(waiting) > 2:
                yield from waiting.popleft()
        for verdicts in waiting:
            yield from verdicts


def as_json(run: Path, by: Workers | None = None, *, first: bool = False) -> bytes:
    return msgspec.json.encode(diagnose_run(run, workers=by, first=first))


@pytest.mark.parametrize("kind", RUNS)
def test_places_give_the_same_report(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS[kind](tmp_path / "run")
    monkeypatch.setattr(cursor, "MAX_READ_BYTES", 300)
    monkeypatch.setattr(cursor, "MIN_READ_BYTES", 1)
    for first in (False, True):
        assert as_json(run, Apart(), first=first) == as_json(run, first=first), first


def test_the_runs_are_of_every_kind(tmp_path: Path) -> None:
    reports = {kind: diagnose_run(write(tmp_path / kind)) for kind, write in RUNS.items()}
    assert {report.verdict for report in reports.values()} == {"clean", "findings", "undetermined"}
    assert len(reports["every step wrong"].findings[0].steps) == 7
    assert reports["one step wrong"].findings[0].steps == [2, 4]
    assert reports["a constant by hand"].verdict == "findings"
    assert reports["something by hand"].verdict == "undetermined"
    assert [finding.code for finding in reports["a parameter that is no copy"].findings] == ["GS105"]
    assert reports["named groups"].run.axes["cp"] == 2
    assert any("overflow" in note for note in reports["an overflow"].coverage.notes)
    assert reports["a step that nobody saw"].reasons[0].startswith("step 2: losses went backward, and no gradient")
    assert sum(bool(reports[kind].coverage.problems) for kind in RUNS if "flipped" in kind or "forged" in kind) > 4


def test_a_run_that_changes_is_not_judged(tmp_path: Path) -> None:
    run = RUNS["every step wrong"](tmp_path / "run")
    told = ToldRun(run, in_two_shares)
    placed = next(told.places())
    for file in run.glob("*.trace"):
        file.write_bytes(file.read_bytes()[:1500])
    with pytest.raises(GradcheckError, match="has changed at byte") as error:
        list(parts(told.ground(), [placed]))
    assert error.value.code == "E416"
