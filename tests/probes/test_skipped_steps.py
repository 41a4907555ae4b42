"""Steps that a trainer skips, and whose gradients its own lines empty."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

Empty = Callable[[nn.Parameter], object]
EMPTY: dict[str, Empty] = {
    "none": lambda param: setattr(param, "grad", None),
    "zeros": lambda param: param.grad.zero_() if param.grad is not None else None,
    "zero_grad": lambda param: torch.optim.SGD([param]).zero_grad(),
}


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    tokens, labels = batch(0, number)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")


def train(
    folder: Path, empty: Empty, skipped: set[int], *, passes: int = 1, in_each_pass: bool = False, times: float = 1
) -> Report:
    """The losses of a step are divided by its own tokens, and multiplied by `times`. `in_each_pass`: what a pass left
    is emptied behind it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run"):
        for step in range(4):
            numbers = [passes * step + k for k in range(passes)]
            num_tokens = sum(int((batch(0, number)[1] != -100).sum()) for number in numbers)
            for k, number in enumerate(numbers):
                (loss_of(model, number) * times / num_tokens).backward()
                if in_each_pass and k < passes - 1:
                    for param in model.parameters():
                        empty(param)
            if step not in skipped:
                optimizer.step()
            for param in model.parameters():
                empty(param)
    return diagnose(read_run(folder / "run"))


@pytest.mark.parametrize("how", EMPTY)
@pytest.mark.parametrize("skipped", [{1}, {0}, {1, 2}], ids=str)
def test_a_skipped_step_that_a_line_empties_is_no_fault(how: str, skipped: set[int], tmp_path: Path) -> None:
    report = train(tmp_path, EMPTY[how], skipped)

    assert report.verdict == "clean", (report.reasons, report.findings)


@pytest.mark.parametrize("how", EMPTY)
def test_passes_that_are_emptied_in_every_step_are_found(how: str, tmp_path: Path) -> None:
    report = train(tmp_path, EMPTY[how], set(), passes=2, in_each_pass=True)

    assert report.verdict == "findings"


@pytest.mark.parametrize("how", EMPTY)
def test_a_skipped_step_hides_no_other_fault(how: str, tmp_path: Path) -> None:
    report = train(tmp_path, EMPTY[how], {1}, passes=2, in_each_pass=True)

    assert report.verdict == "findings"


@pytest.mark.parametrize("how", EMPTY)
def test_a_fault_of_all_steps_is_told_once_beside_a_skipped_one(how: str, tmp_path: Path) -> None:
    report = train(tmp_path, EMPTY[how], {1}, passes=2, times=3)

    assert [finding.code for finding in report.findings] == ["GS303"]


def test_probes_stay_while_an_optimizer_goes_through_its_hooks(tmp_path: Path) -> None:
    """A step without a pass, behind the last that is recorded: a rank that has run out of batches (Join)."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with attach(tmp_path / "run", steps=range(1)) as session:
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        loss_of(model, 1).backward()
        assert not session._open
