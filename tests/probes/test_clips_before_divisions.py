"""Clips of gradients that a line of the trainer's own divides afterwards, and those that are meant so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from probe_workers import Net, batch, token_sum

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

PASSES = 3


def train(folder: Path, max_norm: float, *, of_means: bool = False, clip_first: bool = True) -> Report:
    """Sums over tokens that are divided by all of them behind the last pass, or means by the passes."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(folder / "run", objective="microbatch-mean" if of_means else "global-token-mean"):
        for _ in range(2):
            data = [batch(0, k) for k in range(PASSES)]
            counts = [int((labels >= 0).sum()) for _, labels in data]
            for part, count in zip(data, counts, strict=True):
                (token_sum(model, part) / (count if of_means else 1)).backward()
            if clip_first:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            for param in model.parameters():
                param.grad /= PASSES if of_means else sum(counts)  # type: ignore[operator]
            if not clip_first:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(folder / "run"))


@pytest.mark.parametrize(("max_norm", "of_means"), [(0.5, False), (0.1, True), (1e-3, True)])
def test_a_clip_before_the_division_is_early(tmp_path: Path, max_norm: float, of_means: bool) -> None:
    (finding,) = train(tmp_path, max_norm, of_means=of_means).findings
    assert (finding.code, finding.steps) == ("GS605", [0, 1])
    assert finding.first_event is not None and finding.first_event.kind == "clip"
    assert ("1/accumulation_steps" if of_means else "1/num_tokens") in finding.explanation


@pytest.mark.parametrize("clip_first", [False, True])
def test_a_clip_behind_it_or_by_a_norm_for_sums_is_right(tmp_path: Path, clip_first: bool) -> None:
    tokens = sum(int((batch(0, k)[1] >= 0).sum()) for k in range(PASSES))
    report = train(tmp_path, 0.01 * (tokens if clip_first else 1), clip_first=clip_first)
    assert (report.verdict, report.findings) == ("clean", [])


def test_a_clip_between_the_divisions_of_parameters_is_early(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        data = [batch(0, k) for k in range(PASSES)]
        for part in data:
            token_sum(model, part).backward()
        for index, param in enumerate(model.parameters()):
            param.grad /= sum(int((labels >= 0).sum()) for _, labels in data)  # type: ignore[operator]
            if index == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert finding.code == "GS605"
    assert "3 of 5 were multiplied by" in finding.explanation


@pytest.mark.parametrize(
    ("divides", "lr", "found"),
    [("behind the clip", 99.0, []), ("behind the clip", 0.1, ["GS501"]), ("at the loss", 99.0, [])],
)
def test_a_clip_by_hand_of_sums_may_divide_by_the_tokens_that_all_steps_have(
    tmp_path: Path, divides: str, lr: float, found: list[str]
) -> None:
    """As many in each step: what is left is one norm in all of them, and none that anybody writes. Where the model
    hardly moves, the coefficient is the same, too, and a clip is not told from a constant."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with attach(tmp_path / "run", objective="global-token-mean"):
        for _ in range(3):
            data = [batch(0, k) for k in range(PASSES)]
            count = torch.tensor(float(sum(int((labels >= 0).sum()) for _, labels in data)))
            for part in data:
                (token_sum(model, part) / (count if divides == "at the loss" else 1)).backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            coefficient = 0.05 / torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.mul_(coefficient).div_(count if divides == "behind the clip" else 1)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == found
    assert (report.verdict == "clean") == (divides == "at the loss")
    assert any("if it divides by this number as well" in reason for reason in report.reasons) == (
        divides == "behind the clip"
    )
