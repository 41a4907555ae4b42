"""Gradient buffers as sums of columns."""

from __future__ import annotations

import numpy as np

from gradcheck_dist.ledger.buffers import Buffer, Column


def test_a_buffer_that_is_reduced_again_and_again_holds_each_column_once() -> None:
    """Two ranks average what both hold already, in each of many passes, and nothing can be measured of it."""
    ranks = [Buffer(np.zeros(1)), Buffer(np.zeros(1))]
    for rank in ranks:
        rank.columns.append(Column(np.ones(3), np.ones(1), np.zeros(1), 1.0))
    for _ in range(10):
        sums = [Buffer(np.zeros(1)), Buffer(np.zeros(1))]
        for total in sums:
            for each in ranks:
                total.add(each, 0.5)
        ranks = sums
    for rank in ranks:
        assert len(rank.columns) <= 64
        assert sum(column.nominal for column in rank.columns) == 1
