"""A mean over sequences, batches of which have one length each: no count of tokens explains its weights."""

from __future__ import annotations

import pytest
from simulator import Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose

SEQUENCES = {(0, 0, 0): (2, 9), (0, 1, 0): (4, 4), (1, 0, 0): (3, 5), (1, 1, 0): (2, 7)}
"""Their number in a batch, and the length of each."""


@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (2.0, ["GS000"])])
def test_a_mean_over_sequences_is_left_open(factor: float, found: list[str]) -> None:
    """Or twice that mean, which is none."""

    def root(key: Key, tokens: dict[Key, int]) -> float:
        num, length = SEQUENCES[key]
        return factor * num / 11 / (num * length)

    world = World(Trainer(root=root, op="sum", data_ranks=2, accumulation=2))
    world.num_tokens.update({key: num * length for key, (num, length) in SEQUENCES.items()})
    report = diagnose(world.run())
    assert [finding.code for finding in report.findings] == found
    assert any("a mean over 11 samples" in reason for reason in report.reasons) == (factor == 1.0)
