"""Commands that read a run take it from any store; those that write or follow one say that they need a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest
from command_line_doubles import Gradcheck
from small_runs import write_run


def test_commands_read_stores_and_none_writes_there(gradcheck: Gradcheck, tmp_path: Path) -> None:
    run, store = write_run(tmp_path / "run", flush_steps=True), "memory://test-stores/run"
    fs = fsspec.filesystem("memory")
    for file in run.iterdir():
        fs.pipe_file(f"/test-stores/run/{file.name}", file.read_bytes())
    assert gradcheck("diagnose", store, "--first").code == 1
    assert gradcheck("diagnose", store, "--format", "json").out == gradcheck("diagnose", run, "--format", "json").out
    assert "GS101" in gradcheck("report", store).out
    page = tmp_path / "page.html"
    assert gradcheck("report", store, "--output", page).code == 0
    assert page.stat().st_size > 100_000
    outcome = gradcheck("export", store)
    assert (outcome.code, "--output" in outcome.err) == (2, True)
    assert gradcheck("export", store, "--output", tmp_path / "tables").code == 0
    before = fs.find("/test-stores")
    for command in (
        ["watch", store],
        ["watch", run, "--compare", store],
        ["run", "--out", store, "--", "true"],
        ["scenario", "ddp-accum", "--keep", store],
        ["compare", store, run],
        ["compare", run, store],
    ):
        refused = gradcheck(*command)
        assert (refused.code, "error E512" in refused.err) == (2, True), command
    assert fs.find("/test-stores") == before
    fs.rm("/test-stores", recursive=True)


def test_without_dask_it_is_said_what_to_install(
    gradcheck: Gradcheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    outcome = gradcheck("diagnose", write_run(tmp_path / "run"), "--dask", "local")
    assert outcome.code == 2
    assert "error E412" in outcome.err and "pip install 'gradcheck-dist[dask]'" in outcome.err
