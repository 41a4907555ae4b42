"""Lines between backward and the optimizer that were measured to do nothing are no clip, whatever norm is left."""

from __future__ import annotations

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.steps import hand_clip


@pytest.mark.parametrize("norm", [0.81, 0.8123])
def test_a_reduction_that_lacks_is_told_where_the_gradient_has_a_round_norm_by_chance(
    norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most parameters are not reduced; taken for clipped, they would make the others look averaged twice."""
    monkeypatch.setattr(hand_clip, "norm_afterwards", lambda *_: norm)
    trainer = Trainer(root=global_mean(2.0), op="avg", not_reduced=frozenset({"layers.0.weight", "embed.weight"}))
    (finding,) = diagnose(World(trainer).run()).findings
    assert (finding.code, finding.num_parameters) == ("GS103", 2)
