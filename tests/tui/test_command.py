"""gradcheck watch, as far as it goes without a terminal; the rooms' borders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "gradcheck_dist", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


def test_a_folder_that_is_not_there_is_an_error_before_any_screen(tmp_path: Path) -> None:
    done = run("watch", tmp_path / "missing")
    assert done.returncode == 2
    assert done.stderr.startswith("error E751: there is no run folder")


def test_without_a_terminal_it_names_the_command_for_scripts(tmp_path: Path) -> None:
    done = run("watch", tmp_path)
    assert done.returncode == 2
    assert "gradcheck diagnose RUN" in done.stderr
    assert done.stdout == ""


def test_the_screens_load_no_torch_and_the_help_no_textual(faulty_run: Path) -> None:
    screens = f"""
import sys
from gradcheck_dist.tui.screenshot import render
for screen in ("overview", "weights", "timeline", "event", "parameters", "compare", "explain"):
    render({str(faulty_run)!r}, screen, (80, 24))
print(sorted(name for name in sys.modules if name in ("torch", "pandas", "plotly")))
"""
    assert run(code=screens).stdout.strip() == "[]"
    help_page = """
import sys
from gradcheck_dist.cli.main import run
try:
    run(["watch", "--help"])
except SystemExit:
    pass
print(sorted(name for name in sys.modules if name in ("torch", "textual", "numpy", "rich")))
"""
    assert run(code=help_page).stdout.splitlines()[-1] == "[]"


def test_the_first_frame_does_not_wait_for_numpy() -> None:
    code = "import sys, gradcheck_dist.tui.app, gradcheck_dist.tui.screens.overview; print('numpy' in sys.modules)"
    assert run(code=code).stdout.strip() == "False"
