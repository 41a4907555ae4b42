"""Backward passes that differ from the derivative on purpose are remarks, others are findings, right ones nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from meant_models import MEANT, PERHAPS, RIGHT, WRONG, Around, LateMask
from torch import Tensor, nn
from verify_models import VOCAB, WIDTH, batch, loss_of

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trainer.launch import launch, warm_up


def judged(model: Any, folder: Path) -> Report:
    """One step, verified."""
    with gradcheck_dist.attach(folder, verify=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens, labels = batch(0)
        loss_of(model(tokens), labels).backward()
        optimizer.step()
    return gradcheck_dist.diagnose(gradcheck_dist.read_run(folder))


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_right(name: str, tmp_path: Path) -> None:
    report = judged(Around(RIGHT[name]), tmp_path / "run")
    assert [finding.pattern for finding in report.findings] == []
    assert "GS801" in report.rules.passed
    assert not any("verify" in problem for problem in report.coverage.problems)


def test_a_sparse_gradient_of_an_embedding_is_right(tmp_path: Path) -> None:
    report = judged(Around(lambda m, x: x + m.b(m.a(x)), sparse=True), tmp_path / "run")
    assert report.findings == [] and "GS801" in report.rules.passed


def test_a_spectral_norm_is_replayed_with_the_buffers_of_its_call(tmp_path: Path) -> None:
    model = Around(lambda m, x: x + m.b(m.a(x)))
    torch.nn.utils.parametrizations.spectral_norm(model.middle.a)
    folder = tmp_path / "run"
    with gradcheck_dist.attach(folder, verify=True):
        for k in range(2):  # the second forward changes the buffers
            tokens, labels = batch(k)
            loss_of(model(tokens), labels).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    report = gradcheck_dist.diagnose(gradcheck_dist.read_run(folder))
    assert "GS801" in report.rules.passed
    assert not any("verify" in problem for problem in report.coverage.problems)


@pytest.mark.parametrize("name", MEANT)
def test_what_may_be_meant_is_a_remark_with_its_reason(name: str, tmp_path: Path) -> None:
    body, words = MEANT[name]
    report = judged(Around(body), tmp_path / "run")
    found = [finding for finding in report.findings if finding.code == "GS801"]
    assert [finding.severity for finding in found] == ["info"]
    assert words in found[0].pattern and found[0].pattern.startswith("middle: ")
    assert report.verdict != "findings"


def test_a_remark_names_the_line_of_the_stop(tmp_path: Path) -> None:
    (found,) = judged(Around(MEANT["a constant of no_grad"][0]), tmp_path / "run").findings
    assert "meant_models.py:" in found.pattern and "they agree" in found.explanation


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_an_error(name: str, tmp_path: Path) -> None:
    report = judged(Around(WRONG[name]), tmp_path / "run")
    found = [finding for finding in report.findings if finding.code == "GS801"]
    assert [finding.severity for finding in found] == ["error"]
    assert found[0].pattern.startswith("middle: ")


@pytest.mark.parametrize("name", PERHAPS)
def test_a_factor_of_a_function_that_hands_on_is_asked_about(name: str, tmp_path: Path) -> None:
    body, severities = PERHAPS[name]
    report = judged(Around(body), tmp_path / "run")
    found = [finding for finding in report.findings if finding.code == "GS801"]
    assert sorted(finding.severity for finding in found) == severities
    assert all("through" in one.pattern and "--meant Scaled" in one.fix for one in found if one.severity == "warning")


def test_a_backward_that_clips_what_arrives_is_left_open(tmp_path: Path) -> None:
    from meant_models import clipped

    report = judged(Around(clipped), tmp_path / "run")
    assert report.findings == []
    assert any("clips or scales by the gradient itself" in note for note in report.coverage.notes)


def test_a_teacher_below_no_grad_is_nothing_to_speak_of(tmp_path: Path) -> None:
    class Student(Around):
        def __init__(self) -> None:
            super().__init__(lambda m, x: x + m.b(m.a(x)))
            self.teacher = torch.nn.Linear(VOCAB, VOCAB)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = super().forward(tokens)
            with torch.no_grad():
                target = self.teacher(torch.nn.functional.one_hot(tokens, VOCAB).float())
            return logits * (1 + (logits - target).square().mean())

    model = Student()
    folder = tmp_path / "run"
    with gradcheck_dist.attach(folder, verify=True):
        trained = [param for name, param in model.named_parameters() if "teacher" not in name]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        tokens, labels = batch(0)
        loss_of(model(tokens), labels).backward()
        optimizer.step()
    report = gradcheck_dist.diagnose(gradcheck_dist.read_run(folder))
    assert all(finding.severity == "info" for finding in report.findings)


def test_losses_over_the_features_of_all_ranks(tmp_path: Path) -> None:
    """Which gathers are right, which are remarks, and which lose what other ranks want of a feature."""
    warm_up()
    launch("contrast_workers:train_all", (str(tmp_path),), 2, timeout_s=240)

    def found(name: str) -> list[tuple[str, str]]:
        report = gradcheck_dist.diagnose(gradcheck_dist.read_run(tmp_path / name))
        return [(one.severity, one.pattern) for one in report.findings if one.code == "GS801"]

    lost = "gets the gradient of its own rank's share alone"
    assert found("gathered with a gradient, own rows") == []
    assert found("gathered with a gradient, all rows") == []  # R times: what an average over ranks makes up for
    assert found("own put back, all rows") == []  # every rank computes the whole loss
    assert found("own put back, own rows") == [("warning", f"loss: input 1 {lost}")]
    assert found("detached, own put back, own rows") == [("warning", f"loss: input 1 {lost}")]
    ((severity, pattern),) = found("all constant, own rows")
    assert severity == "warning" and "a collective that autograd does not see at contrast_workers.py:" in pattern
    ((severity, pattern),) = found("assignments below no_grad")
    assert severity == "info" and "no_grad" in pattern
    assert found("a metric") == []
    assert found("outside, gathered with a gradient") == []
    assert found("outside, all rows") == []
    assert found("outside, own put back") == [("warning", f"Features: the output 1 {lost}")]
    assert found("outside, assignments") == []  # no gradient arrives where they were computed


class Padded(nn.Module):
    """Every other position is exactly zero."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[-2], 1)
        mask[::2] = 0
        return x * mask


class DeadZone(torch.autograd.Function):
    """Hands its input on, and forgets the gradient where that is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (ctx.saved_tensors[0] != 0)


class Own(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function.apply(x)
        return result


def at_zero(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *middle, nn.Linear(WIDTH, VOCAB))


def _zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


ACTIVATIONS = [nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh(0, 1), nn.PReLU(), nn.MaxPool1d(3, 1, padding=1)]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("before", [Padded, lambda: _zeroed(nn.Linear(WIDTH, WIDTH))], ids=["masked", "zero layer"])
def test_a_kink_exactly_at_the_point_is_right_on_either_side(
    before: Any, activation: nn.Module, tmp_path: Path
) -> None:
    report = judged(at_zero(before(), activation, nn.Linear(WIDTH, WIDTH)), tmp_path / "run")
    assert [finding.pattern for finding in report.findings] == []
    assert "GS801" in report.rules.passed


def test_a_norm_of_zeros_is_too_steep_to_decide(tmp_path: Path) -> None:
    report = judged(at_zero(Padded(), nn.RMSNorm(WIDTH)), tmp_path / "run")
    assert [finding.pattern for finding in report.findings] == []


@pytest.mark.parametrize("function", [LateMask, DeadZone])
def test_a_wrong_backward_is_found_where_its_input_is_zero(
    function: type[torch.autograd.Function], tmp_path: Path
) -> None:
    report = judged(at_zero(Padded(), Own(function)), tmp_path / "run")
    [finding] = [one for one in report.findings if one.code == "GS801"]
    assert finding.severity == "error"
    assert function.__name__ in finding.pattern


def test_a_scripted_module_is_left_out_with_its_reason(tmp_path: Path) -> None:
    model = at_zero(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    report = judged(model, tmp_path / "run")
    assert report.findings == []
    assert any("torch.jit" in f"{one.reason}" for one in report.coverage.unverified) or any(
        "torch.jit" in words for words in [*report.reasons, *report.coverage.notes]
    )
