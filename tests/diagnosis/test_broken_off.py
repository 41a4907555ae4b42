"""Steps that broke off before the optimizer: how many tokens they were to have is not known."""

from __future__ import annotations

import pytest
from held_back import hold_back
from simulator import Hand, OptimizerStep, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose


@pytest.mark.parametrize("not_reduced", [frozenset(), frozenset({"norm.weight"})])
def test_ranks_that_broke_off_between_two_passes_accuse_no_loss(not_reduced: frozenset[str]) -> None:
    """As when a reduction fails behind the first of several passes: what was reduced so far, and what was not."""
    trainer = Trainer(root=lambda key, tokens: 0.28 / sum(tokens.values()), op="sum", not_reduced=not_reduced)
    report = diagnose(hold_back(World(trainer, 1).run(), OptimizerStep))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("x 0.28 so far" in reason for reason in report.reasons), report.reasons


def test_what_is_wrong_beside_right_weights_is_told_without_an_optimizer() -> None:
    trainer = Trainer(root=lambda key, tokens: 1 / sum(tokens.values()), op="sum", own_divide=(("norm.weight", 2.0),))
    (finding,) = diagnose(hold_back(World(trainer, 1).run(), OptimizerStep)).findings
    assert (finding.code, finding.num_parameters) == ("GS101", 1)


def test_a_rank_that_broke_off_before_a_line_that_others_have_behind_them_is_not_accused() -> None:
    """Two ranks' whole means are added up; a line divides them, which the second rank did not come to."""
    divides = Hand("before_optimizer", 0.5, data_ranks=frozenset({0}))
    trainer = Trainer(root=lambda key, tokens: 2 / sum(tokens.values()), op="sum", hands=(divides,))
    report = diagnose(hold_back(World(trainer, 1).run(), OptimizerStep, ranks=[1]))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("weights on rank 1 are x 2" in reason for reason in report.reasons), report.reasons
