"""Ranks import `trainer_workers` by name, so its folder must be on their path."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    from gradcheck_dist.trainer.launch import warm_up

    warm_up()
