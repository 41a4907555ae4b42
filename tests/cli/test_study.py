"""gradcheck study: where its results go. The trainings are replaced; tests/scenarios runs real ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line_doubles import Gradcheck

from gradcheck_dist.scenarios import study, study_render
from gradcheck_dist.trainer import launch


def test_a_report_may_lie_in_the_folder_that_is_made_for_the_results(
    gradcheck: Gradcheck, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(chosen: object, out: Path, on_progress: object) -> Any:
        assert out.is_dir()
        return SimpleNamespace(comparison=SimpleNamespace(exit_code=0))

    monkeypatch.setattr(study, "run", run)
    monkeypatch.setattr(launch, "warm_up", lambda: None)
    for name in ("as_text", "as_markdown"):
        monkeypatch.setattr(study_render, name, lambda result: "the curves\n")
    out = tmp_path / "not" / "yet"
    outcome = gradcheck("study", "--out", out, "--report", out / "r.md")
    assert (outcome.code, (out / "r.md").read_text()) == (0, "the curves\n")
    refused = gradcheck("study", "--out", out, "--report", tmp_path / "nowhere" / "r.md")
    assert refused.code == 2 and "E711" in refused.err and "nowhere" in refused.err
    (tmp_path / "file").write_text("")
    taken = gradcheck("study", "--out", tmp_path / "file")
    assert taken.code == 2 and "E711: cannot make the folder" in taken.err
