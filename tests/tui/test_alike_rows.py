"""Ranks for which others stand in a report have rows of their own on the map."""

from __future__ import annotations

from gradcheck_dist.diagnosis.finding import ContributionKey, Weight
from gradcheck_dist.tui.grid import build_grid


def weight(rank: int, ratio: float, alike: list[int], accumulation_step: int = 0) -> Weight:
    return Weight(
        step=0,
        unit="layers.*",
        holder_rank=rank,
        contribution=ContributionKey(data_rank=0, accumulation_step=accumulation_step, microbatch=0),
        num_tokens=8,
        expected=0.125,
        observed=0.125 * ratio,
        ratio=ratio,
        alike_ranks=alike,
    )


def test_a_rank_that_another_stands_for_has_its_row() -> None:
    grid = build_grid([weight(0, 1.0, [2, 3]), weight(1, 0.5, [])], 0, 1e-5)

    assert grid.rows == tuple(("layers.*", rank) for rank in range(4))
    assert grid.values[3, :, 0].tolist() == [1.0, 0.5, 1.0, 1.0]


def test_a_row_of_its_own_goes_before_what_stands_for_it() -> None:
    grid = build_grid([weight(0, 1.0, [1]), weight(1, 0.5, [])], 0, 1e-5)

    assert grid.values[3, :, 0].tolist() == [1.0, 0.5]


def test_what_a_row_of_its_own_does_not_know_the_other_tells() -> None:
    grid = build_grid([weight(0, 1.0, [1]), weight(0, 1.0, [1], 1), weight(1, 0.5, [])], 0, 1e-5)

    assert grid.values[3].tolist() == [[1.0, 1.0], [0.5, 1.0]]
