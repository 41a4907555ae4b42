"""What holds for all tests."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about what is tested.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

# Where no bytecode may be kept (images set PYTHONDONTWRITEBYTECODE), every command that a test starts and every rank
# would compile the package again: 0.3 s of a rank's second, 2 s of a command's three.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Two workers with a thread for each core wait for each other: 25 tests of verification took 82 s so, and 20 with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A job that a script started in the background ignores Ctrl-C, and so would everything that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ON_DEVICE: Any = contextlib.nullcontext
if os.environ.get("GRADCHECK_TEST_DEVICE"):
    import elsewhere
    import on_cuda

    from gradcheck_dist.trainer import launch

    if on_cuda.DEVICE == "elsewhere":
        launch.launch = on_cuda.through(launch.launch, "elsewhere:run")
        elsewhere.replace(setattr)
    else:
        launch.launch = on_cuda.through(launch.launch)
        ON_DEVICE = on_cuda.OnDevice


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("GRADCHECK_TEST_DEVICE") == "elsewhere":
        for item in items:
            if item.name in elsewhere.LESS_IS_KNOWN:
                item.add_marker(pytest.mark.xfail(reason=elsewhere.LESS_IS_KNOWN[item.name], strict=True))


ONE_BY_ONE = (
    "tests/boot/test_mishaps.py",
    "tests/clients/test_clients.py",
    "tests/notebook/test_examples.py",
    "tests/scenarios/test_library.py",
    "tests/scenarios/test_matrix.py",
)
"""Files of long tests that share no run: they go to whichever worker has time, when all other files are given out."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a worker takes a file whole, with the runs that its tests share, but for these."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file in ONE_BY_ONE else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True, scope="session")
def every_reason_has_a_next_step() -> Iterator[None]:
    import next_steps

    with next_steps.demanded():
        yield


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with ON_DEVICE():
        yield


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    """What torch.compile keeps tells `--verify` that a process compiles: of one test it must not reach the next, and
    neither must the hook that stays for it."""
    yield
    frame = sys.modules.get("torch._dynamo.eval_frame")
    if getattr(frame, "cached_backends", None):
        sys.modules["torch._dynamo"].reset()
    if (module_calls := sys.modules.get("gradcheck_dist.probes.recording.module_calls")) is not None:
        module_calls.remove()
