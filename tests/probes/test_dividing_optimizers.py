"""Optimizers of the program's own that divide what they read by a number that they hold, or are given."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_updates import ACCUMULATION, RATE, STEPS, grad, judged
from probe_workers import Net, batch
from torch import nn

from gradcheck_dist.events import OptimizerStep
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run


class Dividing(torch.optim.Optimizer):
    """One of the trainer's own that divides what it reads by a number that it holds, or that its step is given."""

    def __init__(self, params: list[nn.Parameter], divisor: float | None) -> None:
        super().__init__(params, {"lr": RATE})
        if divisor is not None:
            self.divisor = divisor

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(RATE / (getattr(self, "divisor", 1.0) * scale) * grad(param))


@pytest.mark.parametrize(
    ("held", "given"), [(ACCUMULATION, {}), (None, {"scale": ACCUMULATION}), (None, {}), (ACCUMULATION + 1, {})]
)
def test_an_optimizer_may_divide_by_the_number_that_it_holds(
    tmp_path: Path, held: float | None, given: dict[str, float]
) -> None:
    made: list[Dividing] = []

    def update(model: nn.Module) -> None:
        if not made:
            made.append(Dividing(list(model.parameters()), held))
        made[0].step(**given)
        made[0].zero_grad()

    report = judged(tmp_path, update, divisor=1 / ACCUMULATION)
    if held == ACCUMULATION or given:
        assert (report.verdict, report.findings) == ("undetermined", [])
        assert "Dividing, which is none of torch.optim, holds that number" in report.reasons[0]
    else:
        (finding,) = report.findings
        assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize("max_norm", [0.01, 0.0137, 10_000])
def test_an_optimizer_may_divide_by_a_loss_scale_that_clips_as_well(tmp_path: Path, max_norm: float) -> None:
    """As old fused optimizers do: `step(scale=scale / clip)`. What leaves a norm of more digits than people write, or
    makes gradients longer, is no clip."""
    made: list[Dividing] = []

    def update(model: nn.Module) -> None:
        if not made:
            made.append(Dividing(list(model.parameters()), None))
        norm = math.hypot(*(float(grad(param).norm()) for param in model.parameters()))
        made[0].step(scale=norm / max_norm)
        made[0].zero_grad()

    report = judged(tmp_path, update, divisor=1 / 1024)
    if max_norm == 0.01:
        assert (report.verdict, report.findings) == ("undetermined", [])
        assert "holds scale" in report.reasons[0] and "is 0.01, as a clip" in report.reasons[0]
    else:
        assert [finding.code for finding in report.findings] == ["GS303"]


def test_numbers_that_an_optimizer_counts_make_no_step_in_columns_another_one(tmp_path: Path) -> None:
    class Counting(Dividing):
        num_steps = 0

        def step(self, scale: float = 1.0) -> None:  # type: ignore[override]
            self.num_steps += 1
            super().step(scale)

    model = Net()
    optimizer = Counting(list(model.parameters()), ACCUMULATION)
    with attach(tmp_path, steps=range(2), every_step=True):
        for _ in range(STEPS + 2):
            tokens, labels = batch(0, 0)
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = read_run(tmp_path).ranks[0]
    assert len(trace.shapes) == 1
    assert {event.numbers["divisor"] for event in trace.events if isinstance(event, OptimizerStep)} == {ACCUMULATION}
