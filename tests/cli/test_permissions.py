"""What is there and may not be read is told as that, and not as missing. Root may read all: opening is refused here."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
from command_line_doubles import Gradcheck

from gradcheck_dist.trace import store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tiny_runs.write_run(tmp_path / "run")


def refused(gradcheck: Gradcheck, run: Path, *, says: str, next_step: str) -> None:
    outcome = gradcheck("diagnose", run)
    text = " ".join(outcome.out.split())
    assert outcome.code == 2
    assert f"the trace of rank 1 {says}: its tokens and gradients are unknown" in text
    assert f"next {next_step}" in text
    assert "is missing" not in text


def test_a_trace_that_may_not_be_read_is_no_missing_one(
    gradcheck: Gradcheck, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, *arguments: Any) -> Any:
        if "rank-00001" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, *arguments)

    monkeypatch.setattr(store, "open", refuse, raising=False)
    says = "may not be read by this user"
    refused(gradcheck, run, says=says, next_step="Make the traces readable (chmod a+rX)")


@pytest.mark.parametrize("content", [b"", b"no trace at all"])
def test_a_file_that_is_no_trace_is_not_told_to_be_missing(gradcheck: Gradcheck, run: Path, content: bytes) -> None:
    (run / "rank-00001.trace").write_bytes(content)
    says = "gave nothing that can be read"
    refused(gradcheck, run, says=says, next_step="Copy that file again from where it was recorded")


@pytest.mark.parametrize("command", ["diagnose", "report", "export", "watch"])
def test_a_folder_that_may_not_be_read_is_told_in_one_line(
    gradcheck: Gradcheck, run: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    outcome = gradcheck(command, run)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error E507: {run} may not be read by this user. Make it readable")


def test_what_nobody_foresaw_to_be_forbidden_is_told_without_a_traceback(
    gradcheck: Gradcheck, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret")

    monkeypatch.setattr("gradcheck_dist.stream.diagnose.diagnose_run", refuse)
    outcome = gradcheck("diagnose", run)
    assert (outcome.code, outcome.out) == (2, "")
    assert "this user may not read or write /secret" in outcome.err


def test_runs_are_not_kept_where_this_user_may_not_write(
    gradcheck: Gradcheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    outcome = gradcheck("scenario", "ddp-accum", "--keep", tmp_path / "runs")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"error E512: cannot write into {tmp_path / 'runs'}: this user may not write to {tmp_path}." in outcome.err
