"""What the environment variable says, which processes it concerns, and the installed .pth file."""

from __future__ import annotations

import site
import sys
import sysconfig
import time
from pathlib import Path

import pytest

import gradcheck_dist.boot
from gradcheck_dist.boot.launchers import is_launcher
from gradcheck_dist.boot.protocol import VARIABLE, Boot, Steps, decode, restart_count

PTH = Path(gradcheck_dist.boot.__file__).parent / "purelib" / "gradcheck_dist_boot.pth"


def test_what_is_encoded_is_decoded() -> None:
    boot = Boot("/runs/a b", Steps(2, 5, 100), "sum", verify=True, meant=("Scaled",), sample_size=7)
    assert decode(boot.encode()) == boot


@pytest.mark.parametrize(
    "text", ["", "no json", "{}", "[]", '{"run_dir": "x", "steps": {"last": 1}, "objective": null}']
)
def test_a_variable_of_somebody_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        decode(text)


def test_steps_are_a_range_and_every_nth_behind_it() -> None:
    assert [step for step in range(20) if step in Steps(1, 3)] == [1, 2]
    assert [step for step in range(20) if step in Steps(1, 3, 5)] == [1, 2, 5, 10, 15]
    assert Steps(1, 3).end == 3
    assert Steps(1, 3, 5).end is None


@pytest.mark.parametrize(("value", "count"), [("0", 0), ("2", 2), ("", 0), ("x", 0)])
def test_restarts_are_counted_by_torchrun(value: str, count: int) -> None:
    assert restart_count({"TORCHELASTIC_RESTART_COUNT": value}) == count
    assert restart_count({}) == 0


@pytest.mark.parametrize(
    "command",
    [
        ["python", "/usr/bin/torchrun", "--nproc-per-node", "2", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["python", "-m", "torch.distributed.launch", "train.py"],
        ["python", "-u", "-W", "ignore", "/venv/bin/accelerate", "launch", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "train.py"],
        ["python", "-Im", "pip", "install", "torch"],
    ],
)
def test_launchers_are_left_alone(command: list[str]) -> None:
    assert is_launcher(command, {})


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        (["python", "train.py"], {}),
        (["python", "train.py", "torchrun"], {}),
        (["python", "-c", "import torch"], {}),
        (["python", "-m", "torchtitan.train"], {}),
        (["python", "-u", "-m", "my.accelerate.train"], {}),
        (["python", "/venv/bin/trl", "sft"], {"RANK": "0"}),
        (["python"], {}),
        ([], {}),
    ],
)
def test_trainers_are_no_launchers(command: list[str], environment: dict[str, str]) -> None:
    assert not is_launcher(command, environment)


def test_the_pth_file_is_one_guarded_line_that_names_the_variable() -> None:
    text = PTH.read_text()
    assert text.count("\n") == 1
    assert text.startswith("import os; ")
    assert f'"{VARIABLE}" in os.environ and ' in text


def test_the_pth_file_is_installed_beside_the_package() -> None:
    folders = {sysconfig.get_path("purelib"), *site.getsitepackages()}
    installed = [path for folder in folders for path in Path(folder).glob(PTH.name)]
    assert installed, "run `make install` again: this environment was installed before the .pth file existed"
    assert {path.read_text() for path in installed} == {PTH.read_text()}


def test_without_the_variable_the_pth_file_costs_less_than_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    durations_s = []
    for _ in range(20):
        started = time.perf_counter()
        site.addsitedir(str(PTH.parent), set())
        durations_s.append(time.perf_counter() - started)
    sys.path[:] = [path for path in sys.path if path != str(PTH.parent)]
    assert min(durations_s) < 1e-3


def test_declared_axes_reach_the_ranks() -> None:
    boot = Boot("/run", axes={"dp_shard": 2, "tp": 4})
    assert decode(boot.encode()).axes == {"dp_shard": 2, "tp": 4}


def test_declared_data_ranks_reach_the_ranks() -> None:
    assert decode(Boot("/run").encode()).same_data is None
    assert decode(Boot("/run", same_data=((0, 1), (2, 3))).encode()).same_data == ((0, 1), (2, 3))
