"""Which source lines a report may carry: a trace names files, and may come from a stranger."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.finding import FirstEvent
from gradcheck_dist.reports import source
from gradcheck_dist.reports.culprit import culprit as in_words
from gradcheck_dist.reports.source import excerpt, line_text, modified_s, short_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a folder beside it."""
    folder = tmp_path / "here"
    (folder / ".venv").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def test_python_files_below_the_working_directory_are_shown_by_their_short_path(here: Path) -> None:
    (here / "train.py").write_text("if step:\n\tloss.backward()\n")
    for name in ("train.py", str(here / "train.py"), "./x/../train.py"):
        assert line_text(name, 2) == "loss.backward()"
        assert short_path(name) == "train.py"
        assert modified_s(name) == (here / "train.py").stat().st_mtime
    shown = excerpt("train.py", 2)
    assert shown is not None
    assert shown.numbered() == [(False, 1, "if step:"), (True, 2, "    loss.backward()")]
    assert excerpt("train.py", 3) is None and line_text("train.py", 0) is None


def test_a_file_beside_the_package_is_shown_wherever_one_works(here: Path) -> None:
    assert short_path(str(Path(source.__file__))) == "gradcheck_dist/reports/source.py"


@pytest.mark.parametrize(
    "name",
    ["../secret.py", "{parent}/secret.py", "link.py", ".venv/secret.py", ".secret.py", "secret.txt", "secret.py\0.py"],
)
def test_no_other_file_of_this_machine_is_shown(here: Path, name: str) -> None:
    (here.parent / "secret.py").write_text("TOKEN = 1")
    for file in (".venv/secret.py", ".secret.py", "secret.txt"):
        (here / file).write_text("TOKEN = 1")
    (here / "link.py").symlink_to(here.parent / "secret.py")
    file = name.format(parent=here.parent)
    assert (line_text(file, 1), excerpt(file, 1), modified_s(file)) == (None, None, None)
    assert "here" not in short_path(name)


def test_a_file_too_large_to_be_source_is_not_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "big.py").write_text("x = 1\n" * 10)
    monkeypatch.setattr(source, "MAX_SOURCE_BYTES", 59)
    assert line_text("big.py", 1) is None
    monkeypatch.setattr(source, "MAX_SOURCE_BYTES", 60)
    assert line_text("big.py", 1) == "x = 1"


def test_of_what_python_keeps_in_memory_cells_are_shown_and_files_are_not(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = here.parent / "secret.py"
    monkeypatch.setitem(linecache.cache, "<ipython-input-1>", (14, None, ["loss.backward()\n"], "<ipython-input-1>"))
    monkeypatch.setitem(linecache.cache, str(secret), (9, 1.0, ["TOKEN = 1\n"], str(secret)))
    assert line_text("<ipython-input-1>", 1) == "loss.backward()"
    assert line_text(str(secret), 1) is None


def test_a_culprit_whose_lines_are_not_shown_says_why(here: Path) -> None:
    (here / "train.py").write_text("if step:\n\tloss.backward()\n")
    events = (FirstEvent(rank=0, seq=0, kind="backward", file=f, line=2) for f in ("train.py", "elsewhere/train.py"))
    shown, absent = map(in_words, events)
    assert shown.excerpt is not None and not any("not shown" in fact for fact in shown.facts)
    assert absent.excerpt is None and any("its lines are not shown" in fact for fact in absent.facts)
