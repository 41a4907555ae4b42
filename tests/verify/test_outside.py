"""The code between modules and backward: taken down as it runs, checked like a module, and never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from meant_models import Around, block
from torch import Tensor, nn
from verify_models import VOCAB, Scaled, batch, loss_of

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.events import GradientCheck

Loss = Callable[[Tensor, Tensor], Tensor]


def judged(loss: Loss, folder: Path) -> Report:
    """Two steps of a model whose loss is a function, the first verified; training is the same without."""

    def train() -> Tensor:
        model = Around(block)
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            tokens, labels = batch(step)
            loss(model(tokens), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([param.flatten() for param in model.parameters()])

    with gradcheck_dist.attach(folder, verify=True):
        verified = train()
    assert torch.equal(verified, train())
    return gradcheck_dist.diagnose(gradcheck_dist.read_run(folder))


def outside(folder: Path) -> list[str]:
    events = gradcheck_dist.read_run(folder).ranks[0].events
    return [event.outcome for event in events if isinstance(event, GradientCheck) and event.target == "outside"]


def accusations(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == "GS801"]


def filled(logits: Tensor, labels: Tensor) -> Tensor:
    rows = torch.zeros(labels.shape)
    for index in range(len(rows)):
        rows[index] = F.cross_entropy(logits[index], labels[index], reduction="none")
    return rows.mean()


def penalized(logits: Tensor, labels: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(logits.square().sum(), logits, create_graph=True)
    return loss_of(logits, labels) + 0.1 * slope.square().mean()


def logged(logits: Tensor, labels: Tensor) -> Tensor:
    loss = loss_of(F.dropout(logits, 0.2), labels)
    assert loss.item() > 0
    return loss


class Kept(torch.autograd.Function):
    """A loss that computes its gradient in forward, as warp-ctc does."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            own = logits.detach().requires_grad_()
            loss = loss_of(own, labels)
            (ctx.gradient,) = torch.autograd.grad(loss, own)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient * arrived, None


class KeptWhatever(Kept):
    """The same, which does not look at what arrives."""

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


RIGHT: dict[str, Loss] = {
    "a function that differentiates in forward": lambda logits, labels: Kept.apply(logits, labels) / 3,
    "a row at a time": filled,
    "a gradient penalty": penalized,
    "a dropout and a number for the log": logged,
    "a module without parameters": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "chosen rows": lambda logits, labels: F.cross_entropy(logits[labels > 5], labels[labels > 5]),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_right(name: str, tmp_path: Path) -> None:
    report = judged(RIGHT[name], tmp_path / "run")
    assert accusations(report) == []
    assert outside(tmp_path / "run") == ["right"]


def test_a_wrong_backward_of_a_loss_function_is_found(tmp_path: Path) -> None:
    report = judged(lambda logits, labels: loss_of(Scaled.apply(logits, 3.0), labels), tmp_path / "run")
    (found,) = accusations(report)
    assert found.severity == "error" and found.pattern == "Around: the output gets x 3"
    assert found.factor.observed == pytest.approx(3.0, rel=1e-4)
    assert found.first_event is not None and Path(str(found.first_event.file)).name == "verify_models.py"
    assert "outside of modules" in found.explanation


def test_a_function_that_does_not_look_at_what_arrives_is_found(tmp_path: Path) -> None:
    (found,) = accusations(judged(lambda logits, labels: KeptWhatever.apply(logits, labels) / 3, tmp_path / "run"))
    assert found.severity == "error" and found.factor.observed == pytest.approx(3.0, rel=1e-4)


def test_a_stop_outside_is_a_remark(tmp_path: Path) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels) + F.mse_loss(logits, (2 * logits).detach())

    (found,) = accusations(judged(loss, tmp_path / "run"))
    assert found.severity == "info" and "detach" in found.pattern and "test_outside.py:" in found.pattern


def clamped(logits: Tensor, labels: Tensor) -> Tensor:
    scaled = logits * 1.0
    scaled.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    return loss_of(scaled, labels)


def test_a_hook_of_the_users_leaves_it_open(tmp_path: Path) -> None:
    report = judged(clamped, tmp_path / "run")
    assert accusations(report) == [] and outside(tmp_path / "run") == ["undetermined"]


def test_what_goes_through_another_module_is_not_checked(tmp_path: Path) -> None:
    weights = nn.Linear(VOCAB, VOCAB)
    report = judged(lambda logits, labels: loss_of(weights(logits), labels), tmp_path / "run")
    assert accusations(report) == []
    assert any("goes into another" in note for note in report.coverage.notes)


def test_a_mode_of_the_users_that_outlives_the_record_stays(tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, mode = Around(block), Counting()
    with gradcheck_dist.attach(tmp_path / "run", verify=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens, labels = batch(0)
        logits = model(tokens)
        with mode:
            loss_of(logits, labels).backward()
            assert _get_current_dispatch_mode_stack() == [mode]
        optimizer.step()
    assert _get_current_dispatch_mode_stack() == []
    assert outside(tmp_path / "run") == ["right"]
