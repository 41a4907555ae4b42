"""The screens in a real terminal, over a run that is being written: open, close, open again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")]

WRITER = """
import sys, time
from pathlib import Path
from tiny_runs import header, records
from gradcheck_dist.trace.run import create_run_dir
from gradcheck_dist.trace.writer import TraceWriter, trace_path
folder = create_run_dir(Path(sys.argv[1]), {"world_size": 2})
writers = [TraceWriter(trace_path(folder, rank), header(rank), background=False) for rank in (0, 1)]
stop = Path(sys.argv[2])
for batches in zip(*(records(rank, steps=400) for rank in (0, 1))):
    for writer, batch in zip(writers, batches):
        for record in batch:
            writer.append(record)
        writer.flush()
    if stop.exists():
        break
    time.sleep(0.1)
"""


class Terminal:
    """A tmux server of its own."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-f", "/dev/null", "-S", str(socket)]

    def call(self, *arguments: str) -> str:
        return subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, timeout=20, check=False).stdout

    def start(self, command: str) -> None:
        self.call("new-session", "-d", "-s", "main", "-x", "100", "-y", "30", command)

    def screen(self) -> str:
        return self.call("capture-pane", "-t", "main", "-p")

    def wait_for(self, *words: str, seconds: float = 40) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            text = self.screen()
            if all(word in text for word in words):
                return text
            time.sleep(0.2)
        raise AssertionError(f"{words} did not appear in:\n{self.screen()}")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path / "tmux")
    yield made
    made.call("kill-server")


def test_a_growing_run_is_watched_closed_and_watched_again_while_its_writer_goes_on(
    terminal: Terminal, tmp_path: Path
) -> None:
    run, stop = tmp_path / "run", tmp_path / "stop"
    support = str(Path(__file__).parents[1] / "support")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(run), str(stop)], env=environment)
    try:
        while not run.is_dir():
            time.sleep(0.05)
        watch = f"{sys.executable} -m gradcheck_dist watch {run}"
        terminal.start(f"{watch}; echo CLOSED; {watch}; echo CLOSED AGAIN; sleep 60")
        terminal.wait_for("LIVE", "GS102 repeated-reduction")
        terminal.call("send-keys", "-t", "main", "d")
        terminal.wait_for("FIRST DIVERGENCE")
        terminal.call("send-keys", "-t", "main", "q")
        terminal.wait_for("LIVE", "GS102 repeated-reduction")
        assert writer.poll() is None
        stop.touch()
        assert writer.wait(20) == 0
        terminal.wait_for("REPLAY", "dead", seconds=60)
        terminal.call("send-keys", "-t", "main", "q")
        terminal.wait_for("CLOSED AGAIN")
        assert "Traceback" not in terminal.screen()
    finally:
        stop.touch()
        writer.terminate()
        writer.wait(20)
