"""A trace is read as far as it goes, whatever happened to the file; writing it never fails the caller."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import (
    SCHEMA_VERSION,
    Backward,
    Header,
    Param,
    ProbeError,
    Record,
    Reduce,
    Samples,
    Site,
    StepEnd,
    Tokens,
)
from gradcheck_dist.trace.columns import ColumnWriter, expand
from gradcheck_dist.trace.frames import MAGIC, frame
from gradcheck_dist.trace.reader import TraceTail, decode_values, read_trace
from gradcheck_dist.trace.run import before_restart, create_run_dir, read_run
from gradcheck_dist.trace.writer import TraceWriter, trace_path

PARAM = Param(id=0, name="w", shape=(4,), dtype="float32", num_positions=4, stage=1)


def header(**changes: object) -> Header:
    values = {"schema_version": SCHEMA_VERSION, "tool_version": "0", "rank": 0, "world_size": 1, "pid": 1}
    return Header(started_unix_s=1.0, **{**values, **changes})  # type: ignore[arg-type]


def backward(seq: int) -> Backward:
    return Backward(seq=seq, t_ns=seq, step=0, site=Site("train.py", 3, "main"), accumulation_step=0, params=0)


def write(path: Path, *frames: list[object]) -> None:
    writer = TraceWriter(path, header(), background=False)
    for records in frames:
        for record in records:
            writer.append(record)  # type: ignore[arg-type]
        writer.flush()
    writer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank-00000.trace"
    write(path, [PARAM, backward(1)], [backward(2), backward(3)])
    return path


def test_what_was_written_is_read_back(file: Path) -> None:
    trace = read_trace(file)
    assert trace.params == {0: PARAM}
    assert trace.events == [backward(1), backward(2), backward(3)]
    assert trace.damage == []


def test_a_file_cut_at_any_byte_of_its_last_frame_keeps_the_frames_before_and_names_the_loss(file: Path) -> None:
    data = file.read_bytes()
    last = data.rindex(b"\xf7GC\x01")
    for end in range(last + 1, len(data)):
        file.write_bytes(data[:end])
        trace = read_trace(file)
        assert [event.seq for event in trace.events] == [1]
        assert [(damage.offset, damage.num_bytes) for damage in trace.damage] == [(last, end - last)]


def test_a_cut_between_two_frames_is_no_damage(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex(b"\xf7GC\x01")])
    assert read_trace(file).damage == []


def test_a_flipped_bit_costs_one_frame_and_is_named(file: Path) -> None:
    data = file.read_bytes()
    marks = [index for index in range(len(data)) if data.startswith(b"\xf7GC\x01", index)]
    for position in range(marks[1], marks[2]):
        file.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        trace = read_trace(file)
        assert [event.seq for event in trace.events] == [2, 3]
        assert sum(damage.num_bytes for damage in trace.damage) == marks[2] - marks[1]


def test_a_frame_whose_records_are_no_records_is_damage(file: Path) -> None:
    with open(file, "ab") as end:
        end.write(frame(msgspec.msgpack.encode([{"kind": "backward", "seq": "x"}])))
        end.write(frame(msgspec.msgpack.encode([backward(9)])))
    trace = read_trace(file)
    assert trace.events[-1].seq == 9
    assert "cannot be decoded" in trace.damage[0].reason


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"not a trace at all", "E501"),
        (MAGIC + frame(msgspec.msgpack.encode([header(schema_version=SCHEMA_VERSION + 1)])), "E502"),
        (MAGIC + b"garbage behind the magic", "E503"),
        (MAGIC, "E503"),
        (MAGIC[:3], "E501"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "rank-00000.trace"
    path.write_bytes(content)
    with pytest.raises(GradcheckError) as caught:
        read_trace(path)
    assert caught.value.code == code


def test_a_newer_minor_writer_stays_readable(file: Path) -> None:
    newer = {"kind": "step_end", "seq": 9, "t_ns": 1, "step": 0, "duration_s": 1.0, "probe_s": 0.0, "novelty": [1]}
    with open(file, "ab") as end:
        end.write(frame(msgspec.msgpack.encode([newer])))
    assert isinstance(read_trace(file).events[-1], StepEnd)


def test_a_live_tail_sees_every_record_once_however_the_file_grows(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    growing = tmp_path / "growing.trace"
    growing.write_bytes(b"")
    tail = TraceTail(growing)
    for byte in range(len(data)):
        with open(growing, "ab") as end:
            end.write(data[byte : byte + 1])
        tail.poll()
    assert tail.trace is not None
    assert [event.seq for event in tail.trace.events] == [1, 2, 3]
    assert tail.trace.damage == []
    assert tail.poll() == 0


def test_a_full_disk_ends_the_trace_and_is_kept_as_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-00000.trace"
    writer = TraceWriter(path, header(), background=False)
    writer.append(backward(1))
    writer.flush()

    def full(_fd: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    writer.append(backward(2))
    writer.flush()
    monkeypatch.undo()
    writer.append(backward(3))
    writer.flush()
    writer.close()
    assert isinstance(writer.error, OSError)
    assert [event.seq for event in read_trace(path).events] == [1]


def test_a_write_that_is_cut_short_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-00000.trace"
    monkeypatch.setattr(os, "writev", lambda fd, parts: os.write(fd, b"".join(parts)[:5]))
    writer = TraceWriter(path, header(), background=False)
    writer.append(backward(1))
    writer.close()
    assert [event.seq for event in read_trace(path).events] == [1]
    assert writer.num_bytes == path.stat().st_size


def test_a_record_that_cannot_be_encoded_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.trace"
    writer = TraceWriter(path, header(), background=False)
    writer.append(backward(1))
    writer.append(backward(2**70))
    writer.append(backward(3))
    writer.close()
    first, lost, last = read_trace(path).events
    assert (first.seq, last.seq) == (1, 3)
    assert isinstance(lost, ProbeError)
    assert lost.message.startswith("a record (Backward) could not be written: OverflowError")


def test_names_of_files_whose_bytes_are_no_utf8_are_written_with_escapes(tmp_path: Path) -> None:
    path, script = tmp_path / "rank-00000.trace", os.fsdecode(b"train_\xff.py")
    site, values = Site(script, 3, "main"), np.arange(2).tobytes()
    events = [
        msgspec.structs.replace(backward(1), site=site),
        Tokens(seq=2, t_ns=2, step=0, site=site, accumulation_step=0, microbatch=0, values=values),
    ]
    writer = TraceWriter(path, header(command=(script,)), background=False)
    for event in events:
        writer.append(event)
    columns = ColumnWriter(writer.append)
    for step in (1, 2):
        columns.add(step, [msgspec.structs.replace(events[0], seq=step + 2, step=step)])
    columns.flush()
    writer.close()
    trace = read_trace(path)
    assert trace.header.command == ("train_\\udcff.py",)
    of_steps = [event for one in trace.columns for _, found in expand(trace.shapes[one.shape], one) for event in found]
    assert [event.site for event in [*trace.events, *of_steps]] == [Site("train_\\udcff.py", 3, "main")] * 4
    assert [event.values for event in trace.events if isinstance(event, Tokens)] == [values]


def test_ranks_of_groups_that_were_made_from_an_array_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.trace"
    writer = TraceWriter(path, header(), background=False)
    group = tuple(np.arange(2))
    reduced = Reduce(seq=1, t_ns=1, step=0, impl="all_reduce", op="sum", group=group, params=0)
    writer.append(reduced)
    columns = ColumnWriter(writer.append)
    for step in (1, 2):
        columns.add(step, [msgspec.structs.replace(reduced, seq=step + 1, step=step)])
    columns.flush()
    writer.close()
    read, *others = read_trace(path).events
    assert isinstance(read, Reduce) and read.group == (0, 1)
    assert not [event for event in others if isinstance(event, ProbeError)]


def test_a_forked_child_stays_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-00000.trace"
    writer = TraceWriter(path, header(), background=False)
    size = path.stat().st_size
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    writer.append(backward(1))
    writer.flush()
    writer.close()
    assert path.stat().st_size == size


def test_a_signal_handler_may_close_in_the_midst_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-00000.trace"
    writer = TraceWriter(path, header(), background=False)
    encode, encoded = writer._encode, list[int]()

    def interrupted(records: list[Record]) -> bytes:
        payload = encode(records)
        encoded.append(len(records))
        if len(encoded) == 1:
            writer.append(backward(2))
            writer.flush()  # a lock that is not reentrant would never be had here
        return payload

    monkeypatch.setattr(writer, "_encode", interrupted)
    writer.append(backward(1))
    thread = threading.Thread(target=writer.flush, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert sorted(event.seq for event in read_trace(path).events) == [1, 2]


def test_bfloat16_values_are_read_exactly() -> None:
    assert decode_values("bfloat16", bytes.fromhex("803f00c0")).tolist() == [1.0, -2.0]


def test_samples_keep_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.trace"
    samples = Samples(step=0, rows=b"\x00" * 16, dtype="float32", values=b"\x01\x02\x03\x04")
    write(path, [samples])
    assert read_trace(path).samples == [samples]


def test_a_run_with_a_rank_missing_and_one_damaged_is_read_and_says_so(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {"world_size": 3})
    for rank in (0, 1):
        writer = TraceWriter(trace_path(run_dir, rank), header(rank=rank, world_size=3), background=False)
        writer.append(backward(1))
        writer.close()
    whole = trace_path(run_dir, 1).read_bytes()
    trace_path(run_dir, 1).write_bytes(whole[:-1])
    run = read_run(run_dir)
    assert run.missing_ranks == (2,)
    assert any("rank 2" in problem for problem in run.problems)
    assert any("rank-00001" in problem for problem in run.problems)


def test_a_restarted_rank_leaves_its_earlier_trace_and_the_last_one_counts(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {"world_size": 1})
    for restart, seq in ((0, 1), (1, 2)):
        writer = TraceWriter(trace_path(run_dir, 0, restart), header(), background=False)
        writer.append(backward(seq))
        writer.close()
    assert [event.seq for event in read_run(run_dir).ranks[0].events] == [2]
    assert trace_path(run_dir, 0).exists()
    (told,) = before_restart(run_dir)
    assert "(rank-00000.trace)" in told
    trace_path(run_dir, 0).unlink()
    assert before_restart(run_dir) == []


def test_a_run_is_never_written_over_another(tmp_path: Path) -> None:
    run_dir = create_run_dir(tmp_path / "run", {"world_size": 1})
    TraceWriter(trace_path(run_dir, 0), header(), background=False).close()
    with pytest.raises(GradcheckError, match="already holds a run") as caught:
        create_run_dir(run_dir, {"world_size": 1})
    assert caught.value.code == "E511"


def test_an_empty_file_is_called_empty_and_not_a_stranger_s(tmp_path: Path) -> None:
    file = tmp_path / "rank-00000.trace"
    for data, words in ((b"", "is empty: its rank ended before"), (b"text", "begins with b'text'")):
        file.write_bytes(data)
        with pytest.raises(GradcheckError, match=words) as caught:
            read_trace(file)
        assert caught.value.code == "E501"
