"""An average whose number the losses are multiplied by, and which divides once too often: they divide by too much."""

from __future__ import annotations

import msgspec
import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import LossGradient, LossNumber, Site

AVERAGED_TWICE = Trainer(root=global_mean(1), op="avg", accumulation=3, data_ranks=2)
LINE = Site("train.py", 12, "main")


def judged(trainer: Trainer, *numbers: tuple[float, str]) -> Report:
    """Of losses that are multiplied by these numbers, each as (factor, what is written)."""
    run = World(trainer, 5).run()
    told = [LossNumber(factor, written, "", LINE) for factor, written in numbers]
    for trace in run.ranks.values():
        trace.events = [
            msgspec.structs.replace(event, numbers=told) if isinstance(event, LossGradient) else event
            for event in trace.events
        ]
    return diagnose(run)


@pytest.mark.parametrize("written", ["* world_size", "* 2"])
def test_the_divisor_is_told_where_the_losses_are_multiplied_by_the_ranks(written: str) -> None:
    (finding,) = judged(AVERAGED_TWICE, (2.0, written)).findings
    assert finding.code == "GS101"
    assert f"multiplied by 2 at train.py:12 ({written})" in finding.explanation
    assert "divides by 2 times the tokens of all ranks" in finding.explanation
    assert finding.fix.startswith("Divide by the tokens of all ranks, each counted once")


OTHERS = [[], [(3.0, "* 3")], [(2.0, "* accumulation_steps")], [(2.0, "* world_size"), (0.5, "/ tp_size")]]


@pytest.mark.parametrize("numbers", OTHERS, ids=["none", "3", "passes", "taken out again"])
def test_nothing_is_said_of_it_where_they_are_not(numbers: list[tuple[float, str]]) -> None:
    (finding,) = judged(AVERAGED_TWICE, *numbers).findings
    assert finding.code == "GS101"
    assert finding.explanation.startswith("The loss already divides by the tokens of all ranks")
    assert "counted once" not in finding.fix
