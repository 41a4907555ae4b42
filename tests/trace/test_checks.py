"""What a frame holds is checked as it is read: damage is named with its value, and what is sound stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tiny_runs import write_run

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import AmpUnscale, AnyRecord, ScaleGrads
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.checks import Checks
from gradcheck_dist.trace.frames import MAGIC, frame, iter_frames
from gradcheck_dist.trace.reader import read_trace
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trace.writer import trace_path

Forge = Callable[[dict[str, object]], object]


def forged(folder: Path, kind: str, forge: Forge) -> Path:
    """A run in which the first record of a kind is another one, with a right checksum."""
    file = trace_path(write_run(folder, steps=2), 0)
    done = False
    parts = [MAGIC]
    for piece, _ in iter_frames(file.read_bytes(), len(MAGIC)):
        records = msgspec.msgpack.decode(piece)
        for record in records:
            if record["kind"] == kind and not done:
                forge(record)
                done = True
        parts.append(frame(msgspec.msgpack.encode(records)))
    file.write_bytes(b"".join(parts))
    return folder


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("samples", {"dtype": "int8"}, "a samples record of step 0 has dtype 'int8'; legal are float32"),
        ("samples", {"rows": b"123"}, "3 bytes of rows, no multiple of 16"),
        ("samples", {"values": b"12345678"}, "8 bytes of values, not"),
        ("plan", {"num_values": 7}, "holds all 32 positions of 'embedding.weight', and 7 values"),
        ("plan", {"positions": b"\x40\0\0\0" * 32}, "holds position 64 of 'embedding.weight', which has 32"),
        ("plan", {"param": 77}, "names parameter 77, of which nothing was recorded"),
        ("loss", {"step": -3}, "Expected `int` >= 0"),
        ("reduce", {"group": [0, 1 << 40]}, "Expected `int` <= 1048576"),
        ("backward", {"accumulation_step": "x"}, "Expected `int`, got `str`"),
    ],
)
def test_a_record_that_cannot_be_is_named_with_its_value(
    tmp_path: Path, kind: str, change: dict[str, object], words: str
) -> None:
    folder = forged(tmp_path / "run", kind, lambda record: record.update(change))
    assert words in " ".join(map(str, read_trace(trace_path(folder, 0)).damage))
    report = diagnose_run(folder)
    assert any(words in problem for problem in report.coverage.problems)


def test_a_division_by_what_divides_nothing_is_damage_but_where_an_overflow_skipped_the_step() -> None:
    told: list[str] = []
    events: list[AnyRecord] = [
        *(AmpUnscale(seq=1, t_ns=0, step=0, scale=scale, params=0) for scale in (float("inf"), 0.0, 8.0)),
        ScaleGrads(seq=2, t_ns=0, step=0, divisor=0.0, params=0),
        AmpUnscale(seq=3, t_ns=0, step=1, scale=0.0, params=0, found_inf=True),
    ]
    assert Checks().sort(events, told.append) == [events[2], events[4]]
    assert told == [
        *(f"a amp_unscale record of step 0 divides gradients by {scale}" for scale in ("inf", "0")),
        "a scale_grads record of step 0 divides gradients by 0",
    ]


@pytest.mark.parametrize("change", [{"world_size": 1 << 50}, {"world_size": 0}, {"rank": 9}, {"axes": {"tp": -1}}])
def test_a_header_that_cannot_be_leaves_its_rank_out(tmp_path: Path, change: dict[str, object]) -> None:
    folder = forged(tmp_path / "run", "header", lambda record: record.update(change))
    with pytest.raises(GradcheckError, match="the header cannot be read") as caught:
        read_trace(trace_path(folder, 0))
    assert caught.value.code == "E503"
    assert list(read_run(folder).ranks) == [1]


def test_a_file_under_another_ranks_name_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    trace_path(folder, 1).write_bytes(trace_path(folder, 0).read_bytes())
    report = diagnose_run(folder)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("rank-00001.trace is what rank 0 recorded" in problem for problem in report.coverage.problems)


def test_a_file_that_holds_two_traces_is_read_up_to_the_second(tmp_path: Path) -> None:
    """As of `cat a a`: records that come twice would be gradients and reductions that came twice."""
    once, twice = write_run(tmp_path / "once", steps=2), write_run(tmp_path / "twice", steps=2)
    file = trace_path(twice, 0)
    file.write_bytes(file.read_bytes() + file.read_bytes()[len(MAGIC) :])
    assert len(read_trace(file).events) == len(read_trace(trace_path(once, 0)).events)
    report = diagnose_run(twice)
    assert [(one.code, one.pattern) for one in report.findings] == [
        (one.code, one.pattern) for one in diagnose_run(once).findings
    ]
    assert any("begins another trace" in problem for problem in report.coverage.problems)


@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_a_step_whose_records_contradict_each_other_is_left_open_and_the_others_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    from gradcheck_dist.diagnosis import weighing

    def breaks_at_1(run: object, step: int) -> object:
        if step == 1:
            raise error("a rank that is not there")
        return whole(run, step)

    whole = weighing.step_data
    monkeypatch.setattr(weighing, "step_data", breaks_at_1)
    report = diagnose_run(write_run(tmp_path / "run", steps=3))
    assert report.verdict == "findings"
    assert report.findings[0].steps == [0, 2]
    assert any(reason.startswith("step 1 cannot be judged") for reason in report.reasons)
    assert error.__name__ not in str(report.reasons)


def test_of_a_manifest_only_what_has_the_right_type_is_taken(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "manifest.json").write_text('{"world_size": "many", "command": 5, "scenario": [1], "id": "mine"}')
    report = diagnose_run(folder)
    assert report.run.id == "mine"
    assert report.run.world_size == 2
    assert report.run.scenario is None
