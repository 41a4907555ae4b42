"""Weights before the losses of a pass, as GradNorm and weights by uncertainty learn them, may be meant; a half that
rounds a loss's gradient is no factor; a mean of tasks whose gradients are kept apart accuses no line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from one_process import judged
from torch import Tensor, nn, optim
from torch.nn import functional as F

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach

Combine = Callable[[Tensor, Tensor], Tensor]


def trained(folder: Path, combine: Combine, *, num_passes: int = 1) -> Report:
    """Of a model with a cross-entropy and a squared error in each pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(folder):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(num_passes):
                outputs = model(torch.randn(5, 6))
                labelled = F.cross_entropy(outputs[:, :4], torch.randint(0, 4, (5,)))
                combine(labelled, F.mse_loss(outputs[:, 4:], torch.randn(5, 3))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return judged(folder)


def stacked(weight: float) -> Combine:
    return lambda one, other: (torch.tensor([weight, 2 - weight]) * torch.stack([one, other])).sum()


@pytest.mark.parametrize("weight", [1.3, 1.0001, 0.9999])
def test_tensors_that_weigh_a_stack_of_losses_accuse_nobody(weight: float, tmp_path: Path) -> None:
    report = trained(tmp_path, stacked(weight))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert f"x {weight:g}" in report.reasons[0]


def test_passes_that_nobody_divides_are_found_below_such_tensors(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, stacked(1.0), num_passes=3).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize(("weight", "verdict"), [(1.3, "clean"), (1.0001, "undetermined"), (0.9999, "undetermined")])
def test_a_number_before_a_loss_in_a_sum_may_be_its_coefficient_also_next_to_one(
    weight: float, verdict: str, tmp_path: Path
) -> None:
    report = trained(tmp_path, lambda one, other: weight * one + other)
    assert (report.verdict, report.findings) == (verdict, [])


def test_a_count_that_is_off_by_one_of_many_is_found_in_a_sum(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, num = nn.Linear(6, 4), 2000
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            optimizer.zero_grad()
            outputs = model(torch.randn(num, 6))
            loss = F.cross_entropy(outputs, torch.randint(0, 4, (num,)), reduction="sum") / (num + 1)
            (loss + 0.01 * outputs.pow(2).mean()).backward()
            optimizer.step()
    (finding,) = judged(tmp_path).findings
    assert finding.factor.observed == pytest.approx(num / (num + 1), rel=1e-6)


@pytest.mark.parametrize("right", [True, False])
def test_a_loss_that_is_rounded_to_half_precision_is_right(*, right: bool, tmp_path: Path) -> None:
    """A count that lacks one token is found where it is a power of two, which is short in any precision."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    num = 1111 if right else 2049
    with attach(tmp_path):
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(num, 6)), torch.randint(0, 4, (num,)), reduction="sum")
            ((loss.half() / num).float() if right else loss / (num - 1)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    report = judged(tmp_path)
    assert report.verdict == ("clean" if right else "findings")


@pytest.mark.parametrize("apart", [True, False])
def test_a_mean_of_tasks_is_left_open_where_their_gradients_are_kept_apart(*, apart: bool, tmp_path: Path) -> None:
    """One task counts no tokens. What lies in `.grad` together is halved by a line that is accused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7))
    params = list(model.parameters())
    optimizer = optim.SGD(params, lr=0.1)
    with attach(tmp_path):
        for _ in range(3):
            outputs = model(torch.randn(5, 6))
            labelled = F.cross_entropy(outputs[:, :4], torch.randint(0, 4, (5,)))
            losses = (labelled, F.mse_loss(outputs[:, 4:], torch.randn(5, 3)))
            optimizer.zero_grad()
            kept = []
            for loss in losses:
                if apart:
                    optimizer.zero_grad()
                loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
                kept.append([param.grad.clone() for param in params if param.grad is not None])
            for param, one, other in zip(params, *kept, strict=True):
                param.grad = (one + other) / 2 if apart else other / 2
            optimizer.step()
    report = judged(tmp_path)
    assert report.verdict == ("undetermined" if apart else "findings")
