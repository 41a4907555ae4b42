"""Parameters of one element, or of fewer than there are contributions: temperatures, gates, biases of small heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from simulator import Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report

FEW = (("embed.weight", 96), ("layers.0.weight", 96), ("temperature", 1), ("gates", 3))
RIGHT = Trainer(root=global_mean(2), data_ranks=2, accumulation=2, params=FEW)


def judged(trainer: Trainer, seed: int = 3) -> Report:
    return diagnose(World(trainer, seed).run())


@pytest.mark.parametrize("impl", ["ddp", "all_reduce"])
def test_few_elements_confirm_what_was_recorded(impl: str) -> None:
    report = judged(replace(RIGHT, impl=impl))
    assert report.verdict == "clean"
    assert report.coverage.parameters_observed == len(FEW)


@pytest.mark.parametrize("lacking", ["temperature", "gates"])
def test_a_reduction_that_leaves_them_out_is_found(lacking: str) -> None:
    (finding,) = judged(replace(RIGHT, impl="all_reduce", not_reduced=frozenset({lacking}))).findings
    assert (finding.code, finding.units) == ("GS103", [lacking])


def test_a_divisor_of_their_own_is_found() -> None:
    (finding,) = judged(replace(RIGHT, own_divide=(("temperature", 4.0),))).findings
    assert (finding.code, finding.units, finding.factor.exact) == ("GS104", ["temperature"], "1/2")


def test_what_nobody_recorded_of_one_rank_is_left_open() -> None:
    """One equation: a number of no record may be any contribution's."""
    twice = Hand("before_optimizer", 2.0, data_ranks=frozenset({0}), params=frozenset({"temperature"}))
    report = judged(replace(RIGHT, hands=(twice,)))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "temperature are not the same on ranks 0 and 1" in report.reasons[0]


def test_what_lines_by_hand_leave_out_is_judged_as_a_larger_parameter_is() -> None:
    told = []
    for left in ("temperature", "layers.0.weight"):
        others = frozenset(name for name, _ in FEW if name != left)
        (finding,) = judged(replace(RIGHT, hands=(Hand("before_optimizer", 0.25, params=others),))).findings
        told.append((finding.code, finding.pattern))
    assert told[0] == told[1] == ("GS000", "every contribution x 0.25")


def test_bfloat16_confirms_nothing() -> None:
    report = judged(replace(RIGHT, dtype="bfloat16"))
    assert not report.findings
    assert "temperature" in {one.parameter for one in report.coverage.unidentifiable}
