"""Samples stay within a budget, whatever the model's size, and what had no turn is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.parameters.budget import BUDGET_BYTES, BYTES_PER_ROW, ROWS, sampling_plan
from gradcheck_dist.trace.run import read_run

NUM_PARAMS = 300


class Wide(nn.Module):
    """Many parameters of 1024 elements, side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(NUM_PARAMS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0) / NUM_PARAMS**0.5


def record(folder: Path, steps: int, accumulation: int) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for _ in range(steps):
            for _ in range(accumulation):
                (F.cross_entropy(model(torch.randn(4, 32)), torch.randint(32, (4,))) / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("num_params", [1, 150, 300, 1000, 20_000])
def test_a_plan_keeps_within_the_budget_and_gives_everybody_a_turn(num_params: int) -> None:
    plan = sampling_plan(num_params, 96)
    at_once = -(-num_params // plan.period)
    assert at_once * ROWS * (4 * plan.elements + BYTES_PER_ROW) <= BUDGET_BYTES
    assert 64 <= plan.elements <= 96
    assert (plan.period == 1) == (num_params < 200)


def test_a_wish_for_more_elements_is_granted_where_it_fits() -> None:
    assert sampling_plan(8, 1024).elements == 1024
    assert 64 < sampling_plan(100, 1024).elements < 1024


def test_a_step_takes_no_more_than_its_share_of_the_budget(tmp_path: Path) -> None:
    accumulation = 8
    record(tmp_path / "run", 1, accumulation)
    share = BUDGET_BYTES * (2 * accumulation + 6) / ROWS
    assert share / 4 < (tmp_path / "run" / "rank-00000.trace").stat().st_size <= share


@pytest.mark.parametrize(("steps", "observed"), [(1, NUM_PARAMS // 2), (2, NUM_PARAMS)])
def test_parameters_take_turns_and_those_without_one_are_named(tmp_path: Path, steps: int, observed: int) -> None:
    record(tmp_path / "run", steps, 2)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.coverage.parameters_observed) == ("clean", observed)
    assert report.coverage.parameters_total == NUM_PARAMS
    left_out = [one.reason for one in report.coverage.unidentifiable]
    assert len(left_out) == NUM_PARAMS - observed
    assert all("left out by the sampling plan: its turn is in one of 2 recorded steps" in why for why in left_out)
