"""gradcheck run --live, watch --web and scenario --tui in a pseudo-terminal, beside processes that train."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pexpect
import pytest

from gradcheck_dist.tui.output import Output

JOB = Path(__file__).parents[1] / "support" / "live_job.py"
GRADCHECK = [sys.executable, "-m", "gradcheck_dist"]


def terminal(*arguments: object, cwd: Path, seconds: float = 60) -> pexpect.spawn[str]:
    """gradcheck in a pseudo-terminal of 30 rows and 100 columns."""
    environment = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "COLORTERM": "truecolor"}
    environment |= {"COLUMNS": "100", "LINES": "30"}  # pytest-xdist tells its workers another size
    return pexpect.spawn(
        GRADCHECK[0],
        [*GRADCHECK[1:], *map(str, arguments)],
        dimensions=(30, 100),
        env=environment,
        encoding="utf-8",
        timeout=seconds,
        cwd=str(cwd),
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_live_shows_the_fault_beside_torchrun_and_closing_the_screens_leaves_it_alone(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    shown = terminal(
        "run", "--live", "--steps", "0:400", "--out", "runs", "--", *torchrun, JOB, stop, cwd=tmp_path, seconds=100
    )
    try:
        shown.expect("double-averaging")
        shown.send("d")
        shown.expect("FIRST DIVERGENCE")
        press_until_seen(shown, "\x03", "q closes the")
        shown.send("\x0f")
        shown.expect(r"trained step \d+")
        shown.send("q")  # the output
        press_until_seen(shown, "q", "the command goes on")
        shown.expect("trained step 0")
        log = tmp_path / "runs" / "output.log"
        before, deadline = log.read_text().count("trained step"), time.monotonic() + 60
        while log.read_text().count("trained step") <= before:
            assert time.monotonic() < deadline, "the command does not go on"
            time.sleep(0.05)
        stop.touch()
        shown.expect("the training is through")
        shown.expect("double-averaging")
        shown.expect(pexpect.EOF)
        shown.close()
        assert shown.exitstatus == 0, log.read_text()[-3000:]
    finally:
        stop.touch()
        shown.close(force=True)


def test_tabs_cells_and_the_wheel_answer_to_a_real_mouse(faulty_run: Path) -> None:
    shown = terminal("watch", faulty_run, cwd=faulty_run.parent)

    def press(button: int, column: int, row: int) -> None:
        """As a terminal reports it; columns and rows from 1."""
        shown.send(f"\x1b[<{button};{column};{row}M\x1b[<{button};{column};{row}m")

    try:
        shown.expect("GS102 repeated-reduction")
        press(0, 16, 1)  # the tab of the weights
        shown.expect("weight of one token's loss")
        press(0, 45, 6)  # a cell
        press(65, 45, 6)  # the wheel
        press(0, 30, 1)
        shown.expect("event number|ms since start")
        shown.send("q")
        shown.expect(pexpect.EOF)
        shown.close()
        assert shown.exitstatus == 0
    finally:
        shown.close(force=True)


@pytest.mark.slow
def test_a_failing_command_is_told_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    shown = terminal("run", "--live", "--out", "runs", "--", "sh", "-c", "echo out of memory; exit 7", cwd=tmp_path)
    try:
        shown.expect("COMMAND FAILED, EXIT 7")
        shown.send("q")
        shown.expect("out of memory")
        shown.expect(pexpect.EOF)
        shown.close()
        assert shown.exitstatus == 7
    finally:
        shown.close(force=True)


def test_without_a_terminal_live_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [*GRADCHECK, "run", "--live", "--out", str(tmp_path / "runs"), "--", "touch", str(tmp_path / "started")],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 2
    assert "--live needs a terminal" in done.stderr
    assert not list(tmp_path.iterdir())


def test_web_without_its_server_names_the_extra(faulty_run: Path) -> None:
    code = (
        "import sys; sys.modules['textual_serve.server'] = None\n"
        "from gradcheck_dist.cli.main import main\n"
        f"sys.argv = ['gradcheck', 'watch', {str(faulty_run)!r}, '--web']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install 'gradcheck-dist[web]'" in done.stderr


def test_web_serves_a_page_to_this_machine(faulty_run: Path) -> None:
    pytest.importorskip("textual_serve", reason="needs the extra web")
    port = free_port()
    server = subprocess.Popen(
        [*GRADCHECK, "watch", str(faulty_run), "--web", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        page = ""
        deadline = time.monotonic() + 40
        while not page and time.monotonic() < deadline:
            time.sleep(0.2)
            try:
                page = urllib.request.urlopen(f"http://localhost:{port}/", timeout=5).read().decode()
            except OSError:
                assert server.poll() is None
        assert "gradcheck watch" in page
        again = subprocess.run(
            [*GRADCHECK, "watch", str(faulty_run), "--web", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert again.returncode == 2
        assert f"cannot serve on port {port}" in again.stderr
    finally:
        server.terminate()
        server.wait(20)


def test_the_output_is_read_as_a_terminal_would_show_it(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    output = Output(log)
    assert not output.poll()
    log.write_bytes(b"one\n\x1b[31mred\x1b[0m\n 10%\r 50%")
    assert output.poll()
    assert output.lines == ["one", "red", " 50%"]
    with log.open("ab") as file:
        file.write(b"\r100%\nlast\n")
    assert output.poll()
    assert output.lines == ["one", "red", "100%", "last"]
    assert not output.poll()
    log.write_bytes(b"new\n")
    assert output.poll()
    assert output.lines[-1] == "new"


def press_until_seen(shown: pexpect.spawn[str], key: str, words: str) -> None:
    """What is shown for some seconds only may never be painted on a machine that is busy: then the key comes again."""
    for _ in range(6):
        shown.send(key)
        if shown.expect([words, pexpect.TIMEOUT], timeout=15) == 0:
            return
    raise AssertionError(f"{words!r} is not shown")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
