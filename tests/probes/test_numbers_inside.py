"""A function of one's own may multiply each label's loss by a number before it gives them back: that is in the weight
of these labels, as if a line behind the function multiplied by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from probe_workers import Net, batch
from torch import Tensor
from torch.autograd import Function

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

STEPS, PASSES = 3, 2


class Scaled(Function):
    """Each label's cross-entropy, or its log-probability, times `number`; what its backward gives times `again`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, number: float, again: float) -> Tensor:  # type: ignore[override]
        logs, valid = logits.log_softmax(-1), labels >= 0
        at = labels.clamp(min=0)[:, None]
        of_logits = logs.exp().scatter_add(1, at, -torch.ones_like(logs[:, :1])) * valid[:, None] * number
        ctx.save_for_backward(of_logits * again)
        return torch.where(valid, -logs.gather(1, at)[:, 0], 0.0) * number

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad[:, None], None, None, None


class Masked(Function):
    """Each label's cross-entropy times a weight that is given with it; of smoothed labels by `smoothing`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float) -> Tensor:  # type: ignore[override]
        logs, at = logits.log_softmax(-1), labels[:, None]
        wanted = torch.full_like(logs, smoothing / logs.shape[1])
        wanted = wanted.scatter_add(1, at, torch.full_like(logs[:, :1], 1 - smoothing))
        ctx.save_for_backward((logs.exp() - wanted) * weights[:, None])
        return -(wanted * logs).sum(1) * weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ctx.saved_tensors[0] * grad[:, None], None, None, None


def with_weights(run_dir: Path, smoothing: float, own_count: bool) -> Report:
    """Labels that a mask over a count leaves out are classes like others."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir, objective="global-token-mean"):
        for step in range(STEPS):
            data = [batch(0, PASSES * step + k) for k in range(PASSES)]
            count = sum((labels >= 0).sum() for _, labels in data)
            for tokens, labels in data:
                mask = (labels.flatten() >= 0).float()
                weights = mask / (mask.sum() if own_count else count)
                logits = model(tokens).flatten(0, 1)
                losses = Masked.apply(logits, labels.flatten().clamp(min=0), weights, smoothing)
                losses.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def trained(run_dir: Path, kind: str, **options: Any) -> Report:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir, objective="global-token-mean", **options):
        for step in range(STEPS):
            data = [batch(0, PASSES * step + k) for k in range(PASSES)]
            count = float(sum((labels >= 0).sum() for _, labels in data))
            for tokens, labels in data:
                number = 1 / count if "undivided" not in kind else 1.0
                number *= 2.5 if "too large" in kind else 1.0
                again = 1 / number if "forgets" in kind else 1.0
                losses = Scaled.apply(
                    model(tokens).flatten(0, 1), labels.flatten(), -number if "log" in kind else number, again
                )
                (-losses.sum() if "log" in kind else losses.sum()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("kind", ["right", "right log-probabilities"])
def test_a_division_inside_is_one(kind: str, tmp_path: Path) -> None:
    report = trained(tmp_path, kind)
    assert (report.verdict, report.findings) == ("clean", [])
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}


def test_steps_without_samples_accuse_nobody_of_it(tmp_path: Path) -> None:
    report = trained(tmp_path, "right", steps="0:1", every_step=True)
    assert report.findings == []


@pytest.mark.parametrize(("kind", "code"), [("undivided", "GS303"), ("too large", "GS303"), ("forgets", "GS803")])
def test_a_number_that_is_wrong_there_is_found(kind: str, code: str, tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, kind).findings
    assert finding.code == code
    if kind == "too large":
        assert finding.factor.observed == pytest.approx(2.5)


def test_a_mask_over_a_count_that_is_given_is_both(tmp_path: Path) -> None:
    report = with_weights(tmp_path / "right", 0.0, False)
    assert report.findings == []
    assert {round(weight.ratio or 0, 4) for weight in report.weights} <= {1.0}
    assert [one.code for one in with_weights(tmp_path / "wrong", 0.0, True).findings] == ["GS301"]


def test_smoothed_labels_over_a_count_accuse_nobody(tmp_path: Path) -> None:
    assert with_weights(tmp_path, 0.1, False).verdict == "undetermined"
