"""Ranks start quickly, fail loudly and leave nothing behind."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.launch import launch

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def is_running(pid: int) -> bool:
    """Whether the process lives; one that ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def read_pids(folder: Path, count: int, timeout_s: float = 30.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    paths = [folder / f"pid_{rank}" for rank in range(count)]
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)
    return [int(path.read_text()) for path in paths]


def assert_gone(pids: list[int], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if is_running(pid)]}"
        time.sleep(0.02)


def start_script(source: str, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """A user's script in a process of its own: it has no `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    script.write_text(source)
    return subprocess.Popen(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )


SLEEPING_SCRIPT = """
import sys
from gradcheck_dist.trainer.launch import launch
try:
    launch("trainer_workers:sleep", (sys.argv[1], 60.0), 2, timeout_s=60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_results_come_back_by_rank() -> None:
    results = launch("trainer_workers:echo", ({"a": 1},), 3, timeout_s=60, env={"GRADCHECK_TEST": "yes"})
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    assert results == [({"a": 1}, rank, threads, "yes") for rank in range(3)]


def test_no_rank_pays_for_the_import_of_torch() -> None:
    assert max(launch("trainer_workers:cpu_time_s", (), 2, timeout_s=60)) < 0.3


def test_no_rank_begins_before_all_are_forked() -> None:
    forked_s, began_s = zip(*launch("trainer_workers:began", (), 6, timeout_s=60), strict=True)
    assert max(forked_s) <= min(began_s)


def test_a_group_that_was_left_is_not_freed_before_its_rank_ends() -> None:
    assert launch("trainer_workers:leave_group", (), 2, timeout_s=60) == [True, True]


def test_the_caller_may_have_no_main_guard_and_stays_without_torch(tmp_path: Path) -> None:
    source = """
import sys
from gradcheck_dist.trainer.launch import launch
print("begin")
print([value for value, *_ in launch("trainer_workers:echo", (5,), 2, timeout_s=60)], "torch" in sys.modules)
"""
    script = start_script(source, tmp_path)
    assert script.communicate(timeout=60) == ("begin\n[5, 5] False\n", "")


def test_a_thread_may_launch_and_signal_handlers_stay() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(launch("trainer_workers:echo", (1,), 1, timeout_s=60)))
    thread.start()
    thread.join(60)
    assert len(results) == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", "E231", "rank 1 of 3 raised ValueError: no more of this"),
        ("kill", "E232", "rank 1 of 3 was killed by SIGKILL"),
        ("kill while the others wait", "E232", "rank 1 of 3 was killed by SIGKILL"),
        ("exit", "E232", "rank 1 of 3 ended with exit code 7"),
    ],
)
def test_a_dying_rank_is_named_within_seconds_and_the_others_are_gone(
    tmp_path: Path, how: str, code: str, words: str
) -> None:
    start_s = time.monotonic()
    with pytest.raises(GradcheckError, match=words) as caught:
        launch("trainer_workers:lose_rank_one", (str(tmp_path), how), 3, timeout_s=60, log_dir=tmp_path / "logs")
    assert time.monotonic() - start_s < 8
    assert caught.value.code == code
    assert str(tmp_path / "logs" / "rank_1.stderr.log") in str(caught.value)
    assert ("in lose_rank_one" in str(caught.value)) == (how == "raise")
    assert_gone(read_pids(tmp_path, 3), timeout_s=0.5)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("call", r"killed by SIGSEGV(.|\n)*says:\nFatal Python error: Seg.*\nCurrent thread .*\n.* in crash\n"),
        (
            "thread",
            r"killed by SIGABRT(.|\n)*says:\nFatal Python error: Aborted\nin a thread that runs no Python; the main "
            r"thread was here:\nThread .*\n.* in crash\n",
        ),
    ],
)
def test_of_a_rank_that_crashes_the_thread_that_did_is_told(where: str, words: str) -> None:
    with pytest.raises(GradcheckError, match=words):
        launch("trainer_workers:crash", (where,), 1, timeout_s=60)


def test_a_problem_that_a_rank_explains_comes_as_it_is() -> None:
    with pytest.raises(GradcheckError, match=r"^not like this$") as caught:
        launch("trainer_workers:refuse", (), 2, timeout_s=60)
    assert caught.value.code == "E999"


def test_ranks_that_hang_end_in_time_and_say_where(tmp_path: Path) -> None:
    with pytest.raises(GradcheckError, match=r"ran past timeout_s=1 seconds(.|\n)*in sleep") as caught:
        launch("trainer_workers:sleep", (str(tmp_path), 60.0), 2, timeout_s=1)
    assert caught.value.code == "E233"
    assert_gone(read_pids(tmp_path, 2), timeout_s=0.5)


def test_arguments_that_cannot_travel_are_refused() -> None:
    with pytest.raises(GradcheckError, match="cannot be sent") as caught:
        launch("trainer_workers:echo", (lambda: None,), 1)
    assert caught.value.code == "E234"
    with pytest.raises(GradcheckError, match="from 1 up"):
        launch("trainer_workers:echo", (1,), 0)


def test_ctrl_c_ends_the_ranks_and_reaches_the_caller(tmp_path: Path) -> None:
    script = start_script(SLEEPING_SCRIPT, tmp_path, str(tmp_path))
    pids = read_pids(tmp_path, 2)
    script.send_signal(signal.SIGINT)
    assert script.communicate(timeout=20) == ("interrupted\n", "")
    assert_gone(pids, timeout_s=0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_a_caller_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    script = start_script(SLEEPING_SCRIPT, tmp_path, str(tmp_path))
    pids = read_pids(tmp_path, 2)
    script.send_signal(number)
    script.communicate(timeout=20)
    assert_gone(pids)


def test_nothing_of_a_finished_launch_is_left(tmp_path: Path) -> None:
    script = start_script(SLEEPING_SCRIPT.replace("60.0", "0.0"), tmp_path, str(tmp_path))
    pids = read_pids(tmp_path, 2)
    assert script.communicate(timeout=20) == ("", "")
    assert_gone(pids, timeout_s=0.5)


def test_a_port_that_somebody_took_meanwhile_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradcheck_dist.trainer import launch as module

    clash = "The server socket has failed to listen: EADDRINUSE, address already in use"
    outcomes: list[Any] = [clash, {0: pickle.dumps("fine")}, clash, clash, clash]
    monkeypatch.setattr(module, "_launch_once", lambda *_: outcomes.pop(0))
    assert launch("trainer_workers:echo", (1,), 1) == ["fine"]
    with pytest.raises(GradcheckError, match=r"could not start 1 processes: .*EADDRINUSE") as caught:
        launch("trainer_workers:echo", (1,), 1)
    assert caught.value.code == "E230"


def test_a_rank_reads_no_probe_of_its_own(tmp_path: Path) -> None:
    assert launch("trainer_workers:read_by_attaching", (str(tmp_path / "run"),), 2) == [[], []]


def test_a_launcher_that_fails_says_why(tmp_path: Path) -> None:
    """With a torch whose launcher is another one, say."""
    program = (
        "import multiprocessing, sys\n"
        "from gradcheck_dist.trainer import elastic, worker\n"
        "def run(*args): raise AttributeError('LaunchConfig has no such field')\n"
        "elastic.run = run\n"
        "receiver, sender = multiprocessing.Pipe(duplex=False)\n"
        "worker.run_agent(sender, b'', 1, 1.0, sys.argv[1])\n"
        "print('sent', receiver.recv())\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60, env=os.environ | {"PYTHONPATH": path}
    )
    log = (tmp_path / "agent.log").read_text()
    assert "sent AttributeError: LaunchConfig has no such field" in log
    assert "Traceback" in log


def test_a_launcher_whose_folder_is_gone_ends_without_a_word(tmp_path: Path) -> None:
    """After a Ctrl-C while it started."""
    program = (
        "import multiprocessing, sys\n"
        "from gradcheck_dist.trainer import worker\n"
        "receiver, sender = multiprocessing.Pipe(duplex=False)\n"
        "worker.run_agent(sender, b'', 1, 1.0, sys.argv[1])\n"
        "print('sent', receiver.poll())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "gone")],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "sent False\n", "")
