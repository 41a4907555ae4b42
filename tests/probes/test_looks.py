"""Passes whose gradients are only looked at, or used for something else, are no contributions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged, record
from probe_workers import batch, token_sum
from torch import nn
from torch.func import functional_call

from gradcheck_dist.probes import attach

NUM = 3


@pytest.mark.parametrize("after", [0, NUM - 1])
@pytest.mark.parametrize("divisor", [1, NUM])
def test_gradients_of_inputs_in_between_are_no_contribution(tmp_path: Path, after: int, divisor: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for k in range(NUM):
            tokens, labels = batch(0, 0)
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / divisor).backward()
            if k == after:
                features = torch.randn(5, 16, requires_grad=True)
                torch.autograd.grad(F.cross_entropy(model.head(features), torch.arange(5)), features)
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert report.verdict == ("clean" if divisor == NUM else "findings")
    assert [finding.factor.observed for finding in report.findings] == ([] if divisor == NUM else [pytest.approx(NUM)])


@pytest.mark.parametrize("divisor", [1, NUM])
def test_first_order_inner_steps_are_no_contribution(tmp_path: Path, divisor: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for k in range(NUM):
            params = dict(model.named_parameters())
            tokens, labels = batch(0, 1 + k)
            support = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            gradients = torch.autograd.grad(support, list(params.values()))
            fast = {name: param - 0.4 * g for (name, param), g in zip(params.items(), gradients, strict=True)}
            tokens, labels = batch(0, 0)
            logits = functional_call(model, fast, (tokens,)).flatten(0, 1)
            (F.cross_entropy(logits, labels.flatten()) / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert any(f"the gradients of {NUM} passes were handed to the caller" in one for one in report.coverage.notes)
    assert report.verdict == ("clean" if divisor == NUM else "findings")
    if report.findings:
        (finding,) = report.findings
        assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def test_returned_gradients_of_which_some_are_lost_are_found(tmp_path: Path) -> None:
    """Put into .grad in the place of what was there, where they should have been added."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = [batch(0, k) for k in range(NUM)]
        num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
        params = list(model.parameters())
        for part in data:
            gradients = torch.autograd.grad(token_sum(model, part) / num_tokens, params)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert report.verdict == "findings"
    assert any("x 0" in finding.pattern for finding in report.findings)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_curvature_that_is_looked_at_weighs_no_token(tmp_path: Path, factor: float) -> None:
    """Hutchinson's estimate of a Hessian's diagonal differentiates gradients, which nobody puts into `.grad`."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        params = list(model.parameters())
        tokens, labels = batch(0, 0)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        found = torch.autograd.grad(loss, params, create_graph=True)
        ways = [torch.randint_like(param, 2) * 2 - 1 for param in params]
        torch.autograd.grad(found, params, grad_outputs=ways, retain_graph=True)
        (factor * loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert report.verdict == ("clean" if factor == 1 else "findings")
    assert [finding.factor.observed for finding in report.findings] == ([] if factor == 1 else [pytest.approx(0.5)])


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_of_samples_that_add_up_to_the_batchs_are_told_from_it(tmp_path: Path, factor: float) -> None:
    """Fisher information squares what a batch's own samples give. A bias of fewer elements than samples cannot show
    which of both was read."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    with attach(tmp_path / "run"):
        for _ in range(2):
            inputs, labels = torch.randn(6, 8), torch.randint(0, 4, (6,))
            for sample in range(6):
                log_prob = F.log_softmax(model(inputs[sample : sample + 1]), -1)[0, labels[sample]]
                torch.autograd.grad(log_prob, list(model.parameters()))
            (factor * F.cross_entropy(model(inputs), labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path / "run")
    assert [finding.code for finding in report.findings] == ([] if factor == 1 else ["GS303"])
    assert factor != 1 or report.verdict == "clean"


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_held_out_batch_of_a_loss_with_labels_is_no_part_of_errors_that_count_nothing(
    tmp_path: Path, factor: float
) -> None:
    """The only tokens of the step are those that nobody trains on, looked at twice."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        held_out, labels = batch(0, 9)
        for k in range(NUM):
            if k < 2:
                loss = F.cross_entropy(model(held_out).flatten(0, 1), labels.flatten())
                torch.autograd.grad(loss, list(model.head.parameters()))
            tokens, _ = batch(0, k)
            outputs = model(tokens)
            weight = factor if k == 1 else 1.0
            (weight * (outputs - torch.ones_like(outputs)).square().mean() / NUM).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert report.findings == []
    assert report.verdict == ("clean" if factor == 1 else "undetermined")
    assert any("handed to the caller" in note for note in report.coverage.notes)


@pytest.mark.parametrize("added", [False, True])
def test_the_last_layers_gradient_on_the_steps_own_batch_is_a_look(tmp_path: Path, added: bool) -> None:
    """Of another forward pass. `added`: it is put into `.grad` all the same, which doubles what the layer gets."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens, labels = batch(0, 0)
        looked = torch.autograd.grad(
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()), list(model.head.parameters())
        )
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        for param, gradient in zip(model.head.parameters(), looked if added else (), strict=False):
            param.grad += gradient
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert report.verdict == ("findings" if added else "clean")
    assert [finding.factor.observed for finding in report.findings] == ([pytest.approx(2)] if added else [])
