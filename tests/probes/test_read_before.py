"""What an optimizer read in a step that was not recorded, and nobody emptied before the recorded one behind it."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path

import pytest
import torch
from torch import nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes.session import attach
from gradcheck_dist.stream.diagnose import diagnose

STEPS = 6


def trained(
    run_dir: Path, steps: Container[int], begin: Callable[[torch.optim.Optimizer, nn.Module, int], None]
) -> Report:
    """Two passes a step; `begin` is called in front of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with attach(run_dir, steps=steps):
        for step in range(STEPS):
            begin(optimizer, model, step)
            for _ in range(2):
                loss = nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 5, (6,)))
                (loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return diagnose(run_dir)


def never(optimizer: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    pass


def to_none(optimizer: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    optimizer.zero_grad()


def to_zero(optimizer: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def part_of_it(optimizer: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    model[2].zero_grad()  # type: ignore[operator, index]


def penalty(optimizer: torch.optim.Optimizer, model: nn.Module, step: int) -> None:
    for param in model.parameters():
        param.grad = 0.1 * param.detach()


@pytest.mark.parametrize("steps", [range(2, 4), [3], [1, 3, 5]], ids=str)
def test_gradients_that_nobody_empties_are_found_in_the_first_recorded_step(
    tmp_path: Path, steps: Container[int]
) -> None:
    report = trained(tmp_path, steps, never)
    recorded = [step for step in range(STEPS) if step in steps]
    assert [(finding.code, finding.steps) for finding in report.findings] == [("GS402", recorded)], report.reasons
    assert report.findings[0].num_parameters == 4


@pytest.mark.parametrize("begin", [to_none, to_zero])
def test_emptied_gradients_are_clean(
    tmp_path: Path, begin: Callable[[torch.optim.Optimizer, nn.Module, int], None]
) -> None:
    assert trained(tmp_path, range(2, 4), begin).verdict == "clean"


def test_parameters_whose_gradients_are_emptied_are_not_named(tmp_path: Path) -> None:
    report = trained(tmp_path, range(2, 4), part_of_it)
    assert [finding.code for finding in report.findings] == ["GS402"]
    assert report.findings[0].num_parameters == 2 and "0.weight" in report.findings[0].explanation


def test_an_optimizer_that_steps_twice_is_told_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with attach(tmp_path, steps=[2]):
        for _ in range(4):
            nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 5, (6,))).backward()
            optimizer.step()
            optimizer.step()
    report = diagnose(tmp_path)
    assert [(finding.code, finding.num_parameters) for finding in report.findings] == [("GS402", 4)], report.reasons


def test_what_a_line_puts_there_in_each_step_is_not_taken_for_it(tmp_path: Path) -> None:
    report = trained(tmp_path, [3], penalty)
    assert report.verdict == "undetermined" and not report.findings
