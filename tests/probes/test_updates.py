"""Optimizers that update inside of the backward pass, or not at every step: judged where they can be, never accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import pretend
from probe_workers import Net, batch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

RATE = 0.05
Loop = Callable[[nn.Module, Callable[[int], Tensor]], None]


class Released(torch.optim.Optimizer):
    """Steps each parameter as its gradient comes; `step` on all of them is called as well, and has nothing to do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})
        for group in self.param_groups:
            for param in group["params"]:
                param.register_post_accumulate_grad_hook(self.release)

    def release(self, param: Tensor) -> None:
        self.step(param)
        param.grad = None

    @torch.no_grad()
    def step(self, only: Tensor | None = None) -> None:  # type: ignore[override]
        if only is not None and only.grad is not None:
            only -= RATE * only.grad


class Gathering(torch.optim.Optimizer):
    """Adds up gradients by itself, and moves parameters at every `every`-th step by their mean."""

    def __init__(self, params: Any, every: int, through_data: bool) -> None:
        super().__init__(params, {"lr": RATE})
        self.calls, self.every, self.through_data = 0, every, through_data

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        for param in self.param_groups[0]["params"]:
            total = self.state[param].setdefault("sum", torch.zeros_like(param))
            total += param.grad
            if self.calls % self.every == 0:
                target = param.data if self.through_data else param
                target -= RATE / self.every * total
                total.zero_()


class Beginning(torch.optim.Optimizer):
    """Only looks at the gradients of its first step (SOAP)."""

    def __init__(self, params: Any, through_data: bool) -> None:
        super().__init__(params, {"lr": RATE})
        self.through_data = through_data

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if "basis" in self.state[param]:
                target = param.data if self.through_data else param
                target -= RATE * param.grad
            self.state[param]["basis"] = param.grad.clone()


class InHooks(torch.optim.Optimizer):
    """As LOMO does it: a hook that runs when the next gradient comes, and once more behind backward; no `step`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE})
        self.measures = False  # the norm, for a clip in the next pass
        for param in self.param_groups[0]["params"]:
            param.register_hook(self.update)

    @torch.no_grad()
    def update(self, grad: Tensor | None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                if not self.measures:
                    param.data -= RATE * param.grad
                param.grad = None


def judged(folder: Path, loop: Loop, divisor: float = 1.0) -> Report:
    torch.manual_seed(0)
    model = Net()

    def loss(k: int) -> Tensor:
        tokens, labels = batch(0, k)
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / divisor

    with attach(folder, steps=range(3)):
        loop(model, loss)
    report = diagnose(read_run(folder))
    assert [probe.probe for probe in report.coverage.probes_missing if "Error" in probe.reason] == []
    return report


def releasing(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    optimizer = Released(model.parameters())
    for k in range(4):
        loss(k).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_that_were_stepped_inside_of_backward_are_not_read_again_behind_it(tmp_path: Path) -> None:
    report = judged(tmp_path / "right", releasing)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    assert report.coverage.parameters_observed == report.coverage.parameters_total
    [finding] = judged(tmp_path / "wrong", releasing, divisor=4).findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(0.25))


@pytest.mark.parametrize(("every", "through_data"), [(2, False), (4, False), (4, True)])
def test_an_optimizer_that_keeps_gradients_for_a_later_step_accuses_nobody(
    tmp_path: Path, every: int, through_data: bool
) -> None:
    def gathering(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
        optimizer = Gathering(model.parameters(), every, through_data)
        for k in range(5):
            loss(k).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = judged(tmp_path, gathering, divisor=3)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert diagnose_run(tmp_path).verdict == "undetermined"  # step by step, as commands do
    assert any("Gathering was given gradients and moved no parameter" in reason for reason in report.reasons)


def test_an_optimizer_that_begins_is_known_by_what_an_accelerator_tells_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    test_an_optimizer_that_only_begins_its_state_in_the_first_step_is_judged(tmp_path, False)


@pytest.mark.parametrize("every", [2, 4])
def test_values_of_parameters_on_an_accelerator_tell_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    pretend(monkeypatch)
    test_an_optimizer_that_keeps_gradients_for_a_later_step_accuses_nobody(tmp_path, every, True)


@pytest.mark.parametrize("through_data", [False, True])
def test_an_optimizer_that_only_begins_its_state_in_the_first_step_is_judged(
    tmp_path: Path, through_data: bool
) -> None:
    def beginning(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
        optimizer = Beginning(model.parameters(), through_data)
        for k in range(4):
            loss(k).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = judged(tmp_path / "right", beginning)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    assert any("step 0: Beginning was given gradients and moved no" in note for note in report.coverage.notes)
    [finding] = judged(tmp_path / "wrong", beginning, divisor=3).findings
    assert (finding.code, finding.factor.exact, finding.steps) == ("GS303", "1/3", [0, 1, 2])
    assert diagnose_run(tmp_path / "wrong").findings  # step by step, as commands do


def test_an_optimizer_that_moves_parameters_past_autograd_is_judged(tmp_path: Path) -> None:
    def stepping(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
        optimizer = Gathering(model.parameters(), 1, through_data=True)
        for k in range(4):
            loss(k).backward()
            optimizer.step()
            optimizer.zero_grad()

    report = judged(tmp_path, stepping)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_a_learning_rate_of_zero_is_a_step_all_the_same(tmp_path: Path) -> None:
    def warming_up(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for k in range(4):
            loss(k).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert judged(tmp_path, warming_up).verdict == "clean"


@pytest.mark.parametrize("passes", [1, 2])
def test_updates_in_hooks_of_backward_accuse_nobody(tmp_path: Path, passes: int) -> None:
    """`passes` 2: the first only measures the norm, and throws its gradients away."""

    def fused(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
        optimizer = InHooks(model.parameters())
        for k in range(4):
            for index in range(passes):
                optimizer.measures = index < passes - 1
                loss(k).backward()
                optimizer.update(None)

    report = judged(tmp_path, fused)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("inside of the backward pass" in reason for reason in report.reasons), report.reasons


@pytest.mark.parametrize("passes", [1, 2])
def test_updates_in_hooks_are_told_later_by_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    pretend(monkeypatch)
    test_updates_in_hooks_of_backward_accuse_nobody(tmp_path, passes)
