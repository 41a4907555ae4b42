"""The bar of what takes long: it comes after a second, tells the share, and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_runs import write_run

import gradcheck_dist
from gradcheck_dist import progress_bar


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What a notebook's cell would show: a kernel that keeps what is displayed and written over."""
    seen: list[object] = []
    handle = SimpleNamespace(update=lambda page, raw=False: seen.append(page))
    display = SimpleNamespace(HTML=str, display=lambda page, display_id: (seen.append(page), handle)[1])
    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()), display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return seen


def test_loading_a_long_run_tells_how_far_it_is(
    outputs: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run<b>", steps=4, flush_steps=True)
    monkeypatch.setattr(progress_bar, "DELAY_S", 0.0)
    monkeypatch.setattr(progress_bar, "INTERVAL_S", 0.0)
    gradcheck_dist.load(run)
    assert len(outputs) == 5
    assert "judging run&lt;b&gt;: step 3 judged, 4 in all, 4 with findings, 100% of the run read" in str(outputs[3])
    assert outputs[-1] == {"text/plain": ""}


def test_what_is_quick_shows_nothing(outputs: list[object], tmp_path: Path) -> None:
    gradcheck_dist.load(write_run(tmp_path / "run"))
    assert outputs == []


def test_a_terminal_gets_a_bar_and_a_pipe_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "DELAY_S", 0.0)
    with progress_bar.progress_bar("judging [red]x") as say:
        say(0.5, "half")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar.progress_bar("judging [red]x") as say:
        say(0.5, "half")
    shown = capsys.readouterr()
    assert "judging [red]x: half" in shown.err
    assert "50%" in shown.err
    assert shown.out == ""
