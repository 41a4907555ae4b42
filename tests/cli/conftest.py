"""The command line in this process, with an engine that always answers the same."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line_doubles import Engine, Gradcheck, Outcome
from sample_reports import report

from gradcheck_dist.cli import main as command_line
from gradcheck_dist.events import SCHEMA_VERSION, Header, RunEnd
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path


@pytest.fixture
def gradcheck(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Gradcheck:
    """Run one command line: gradcheck("diagnose", folder)."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["gradcheck", *map(str, arguments)])
        code = 0
        try:
            command_line.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A readable run folder of one rank."""
    folder = create_run_dir(tmp_path / "run", {"world_size": 1})
    header = Header(schema_version=SCHEMA_VERSION, tool_version="", rank=0, world_size=1, pid=1, started_unix_s=0.0)
    writer = TraceWriter(trace_path(folder, 0), header, background=False)
    writer.append(RunEnd(seq=0, t_ns=0, step=0))
    writer.close()
    return folder


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    found = Engine(report(), {})
    monkeypatch.setitem(
        sys.modules,
        "gradcheck_dist.diagnosis.engine",
        SimpleNamespace(diagnose=found.diagnose),  # type: ignore[arg-type]
    )
    monkeypatch.setitem(
        sys.modules,
        "gradcheck_dist.stream.diagnose",
        SimpleNamespace(diagnose_run=found.diagnose_run),  # type: ignore[arg-type]
    )
    return found
