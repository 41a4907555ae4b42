"""Real trainers of random pieces, whose gradients are measured: none that is right is accused, none that is wrong is
called clean. What may be meant (a coefficient before a loss that counts no tokens) may be left open."""

from __future__ import annotations

from pathlib import Path

import pytest
from composer import compose
from measured import Outcome, outcome

from gradcheck_dist.trainer.launch import warm_up

FEW, MANY = 12, 300


def outcomes(folder: Path, seeds: range) -> list[Outcome]:
    warm_up()
    return [outcome(compose(seed), folder / str(seed)) for seed in seeds]


def check(found: list[Outcome]) -> None:
    assert [str(one) for one in found if one.script.fault is None and not one.is_right] == []
    assert [str(one) for one in found if one.script.fault is None and one.report.findings] == []
    assert [str(one) for one in found if not one.is_right and one.report.verdict == "clean"] == []


@pytest.mark.slow
def test_a_few_trainers_are_judged_by_what_their_gradients_are(tmp_path: Path) -> None:
    found = outcomes(tmp_path, range(FEW))
    check(found)
    verdicts = [one.report.verdict for one in found]
    assert min(verdicts.count(verdict) for verdict in ("clean", "findings")) > 1, verdicts  # else nothing is told here


@pytest.mark.simulation
@pytest.mark.timeout(3600)
def test_many_trainers_are_judged_by_what_their_gradients_are(tmp_path: Path) -> None:
    check(outcomes(tmp_path, range(FEW, FEW + MANY)))
