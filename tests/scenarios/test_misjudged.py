"""Faults that the engine does not judge right yet, with what it should say: one that is mended moves to the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.scenarios.runner import run_scenario
from gradcheck_dist.scenarios.schema import parse

FILES = sorted((Path(__file__).parent / "misjudged").glob("*.yaml"))


@pytest.mark.library
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.xfail(strict=True, reason="known misjudgement")
def test_a_known_misjudgement_is_judged_as_its_file_says(file: Path) -> None:
    assert run_scenario(parse(file.read_text(encoding="utf-8"), str(file))).report.as_expected
