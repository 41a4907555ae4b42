"""Ranks import `probe_workers` by name, so its folder must be on their path; no session outlives a test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    yield
    from gradcheck_dist.probes import session

    if session._session is not None:
        session._session.detach()
