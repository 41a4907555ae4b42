"""What changes gradients between the call of an optimizer's step and the update: hooks that torch runs in front of it,
and subclasses that hand on to their parent's step. The update reads what these leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import judged, record
from probe_workers import Net, batch, token_sum
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach

NUM_PASSES, NUM_STEPS = 3, 3
LINES = [index for index, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("  # told")]


class Handing(torch.optim.SGD):
    """Divides sums by tokens in its own step. `divisor` does so once more."""

    divisor = 1.0

    def grads(self) -> list[Any]:
        return [param.grad for group in self.param_groups for param in group["params"]]

    def step(self, *args: Any, tokens: float = 1.0, **kwargs: Any) -> Any:
        for grad in self.grads():
            grad.div_(tokens * self.divisor)  # told
        return super().step(*args, **kwargs)


class Halving(Handing):
    divisor = 2.0


class HandingTwice(Handing):
    """Undoes what its parent does too much."""

    divisor = 2.0

    def step(self, *args: Any, **kwargs: Any) -> Any:
        for grad in self.grads():
            grad.mul_(2.0)
        return super().step(*args, **kwargs)


class Clipping(Handing):
    def step(self, *args: Any, tokens: float = 1.0, **kwargs: Any) -> Any:
        torch._foreach_div_(self.grads(), tokens)
        torch.nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.01)
        return torch.optim.SGD.step(self, *args, **kwargs)


class TrustRatio(Handing):
    """LARS; a parameter of zeros gets no gradient."""

    def step(self, *args: Any, tokens: float = 1.0, **kwargs: Any) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.1 * param.detach().norm() / param.grad.norm())
        return torch.optim.SGD.step(self, *args, **kwargs)


def sums(model: nn.Module, step: int) -> float:
    """The tokens of a step, whose sum goes backward."""
    data = [batch(step, index) for index in range(NUM_PASSES)]
    for part in data:
        token_sum(model, part).backward()
    return float(sum(int((labels >= 0).sum()) for _, labels in data))


def handed_on(make: type[Handing], run_dir: Path, parents: str = "") -> Report:
    """`parents`: when torch puts its hooks around the parent's step, too, as an optimizer of that class is made."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step(tokens=sums(model, len(steps)))  # type: ignore[call-arg]
        optimizer.zero_grad()
        steps.append(1)
        if parents == "later":
            torch.optim.SGD(Net().parameters(), lr=0.1)

    steps: list[int] = []
    if parents == "first":
        torch.optim.SGD(Net().parameters(), lr=0.1)
    record(step, run_dir, steps=NUM_STEPS, make=make)
    return judged(run_dir)


@pytest.mark.parametrize("parents", ["", "first", "later"])
@pytest.mark.parametrize("make", [Handing, HandingTwice, Clipping])
def test_what_a_subclass_does_before_its_parents_step_is_read(
    make: type[Handing], parents: str, tmp_path: Path
) -> None:
    report = handed_on(make, tmp_path, parents)
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("parents", ["", "first", "later"])
def test_a_subclass_that_divides_once_more_is_told_with_its_line(parents: str, tmp_path: Path) -> None:
    report = handed_on(Halving, tmp_path, parents)
    (finding,) = report.findings
    assert finding.factor.exact == "1/2"
    assert finding.first_event.line == LINES[0]


def test_a_trust_ratio_inside_of_a_step_accuses_nobody(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = [batch(0, index) for index in range(NUM_PASSES)]
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        for part in data:
            (token_sum(model, part) / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    def make(params: Any, lr: float) -> TrustRatio:
        first, *others = params
        nn.init.zeros_(others[-1])
        return TrustRatio([first, *others], lr=lr)

    record(step, tmp_path, steps=NUM_STEPS, make=make)
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])


def hooked(run_dir: Path, *, divisor: float = 1.0, of_all: bool = False) -> Report:
    """Hooks divide the sums by the step's tokens, times `divisor`, and clip what comes of it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = [1.0]

    def divide(*_: Any) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(tokens[0] * divisor)  # told

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    with attach(run_dir):
        register: Callable[..., Any] = register_optimizer_step_pre_hook if of_all else optimizer.register_step_pre_hook
        handles = [register(divide), register(clip)]
        for index in range(NUM_STEPS):
            tokens[0] = sums(model, index)
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.remove()
    assert not optimizer._optimizer_step_pre_hooks
    return judged(run_dir)


@pytest.mark.parametrize("of_all", [False, True])
def test_what_hooks_do_before_a_step_is_read(of_all: bool, tmp_path: Path) -> None:
    report = hooked(tmp_path, of_all=of_all)
    assert (report.verdict, report.findings) == ("clean", [])


def test_a_hook_that_divides_once_more_is_told_with_its_line(tmp_path: Path) -> None:
    (finding,) = hooked(tmp_path, divisor=2.0).findings
    assert finding.factor.exact == "1/2"
    assert finding.first_event.line == LINES[1]
