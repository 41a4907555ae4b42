"""How many elements of a parameter are sampled where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist import attach
from gradcheck_dist.stats.sampling import MOST, SAMPLE_SIZE, sample_size_of
from gradcheck_dist.trace.reader import read_trace


@pytest.mark.parametrize(
    ("world_size", "elements"), [(1, SAMPLE_SIZE), (24, SAMPLE_SIZE), (32, 128), (64, 256), (128, MOST), (4096, MOST)]
)
def test_each_rank_of_a_large_world_has_elements_of_its_own(world_size: int, elements: int) -> None:
    assert sample_size_of(world_size) == elements


@pytest.mark.parametrize(("given", "elements"), [(None, 256), (8, 8)])
def test_what_is_asked_for_goes_before_the_size_of_the_world(
    given: int | None, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("RANK", "5")
    with attach(tmp_path / "run", sample_size=given):
        pass

    (path,) = (tmp_path / "run").glob("*.trace")
    assert read_trace(path).header.sample_size == elements
