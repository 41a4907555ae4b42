"""What holds for all that is judged here."""

from collections.abc import Iterator

import next_steps
import pytest


@pytest.fixture(autouse=True, scope="session")
def every_reason_has_a_next_step() -> Iterator[None]:
    with next_steps.demanded():
        yield
