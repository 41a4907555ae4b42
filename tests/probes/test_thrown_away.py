"""Passes whose gradients are thrown away before the optimizer comes: what is meant so, and what loses tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged
from probe_workers import Net, batch
from torch import Tensor, nn

from gradcheck_dist.probes import attach

STEPS = 3


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor], reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten(), reduction=reduction)


@pytest.mark.parametrize("by_hand", [False, True])
def test_evaluating_a_batch_twice_throws_no_tokens_away(tmp_path: Path, by_hand: bool) -> None:
    """Sharpness-aware minimisation: the first gradient only says where the second is taken. `by_hand`: no zero_grad
    empties it, but a line that nobody records."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            data = batch(0, step)
            loss_of(model, data).backward()
            moved = [0.05 * param.grad for param in model.parameters() if param.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moved)
            for param in model.parameters() if by_hand else ():
                param.grad = None
            if not by_hand:
                optimizer.zero_grad()
            loss_of(model, data).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moved)
            optimizer.step()
            optimizer.zero_grad()
    assert judged(tmp_path / "run").verdict == "clean"


def test_passes_that_were_evaluated_again_are_no_accumulation_steps(tmp_path: Path) -> None:
    """Sharpness-aware minimisation over an accumulation: the second time, its losses are too large by its length."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            data = [batch(0, 3 * step + k) for k in range(3)]
            num_tokens = sum(int((labels != -100).sum()) for _, labels in data)
            for times in (1, 3):
                optimizer.zero_grad()
                for one in data:
                    (times * loss_of(model, one, reduction="sum") / num_tokens).backward()
            optimizer.step()
    [finding] = judged(tmp_path / "run").findings
    assert (finding.code, finding.factor.exact, finding.factor.expression) == ("GS303", "3", "accumulation_steps")


def test_a_number_of_passes_that_were_thrown_away_is_no_coefficient_of_a_loss(tmp_path: Path) -> None:
    """One step has three passes and empties each but the last. Its losses are divided by three, beside another term."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run", objective="microbatch-mean"):
        for step, passes in enumerate((1, 1, 3)):
            for k in range(passes):
                optimizer.zero_grad()
                tokens, labels = batch(k, step)
                logits = model(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                (loss / passes + 0.01 * logits.logsumexp(-1).square().mean() / passes).backward()
            optimizer.step()
    report = judged(tmp_path / "run")
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "0.3333 x stands before the loss in a sum of several" in report.reasons[0]


@pytest.mark.parametrize(("steps", "verdict"), [([0], "clean"), ([0, 1, 2], "undetermined")])
def test_a_warm_up_is_no_fault_and_a_zero_grad_at_its_own_pass_is_left_open(
    tmp_path: Path, steps: list[int], verdict: str
) -> None:
    """In every step it may be for statistics of gradients, or an attack on the input that another batch is to bear."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            if step in steps:
                loss_of(model, batch(0, 7 + step)).backward()
                optimizer.zero_grad()
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path / "run")
    assert (report.verdict, [finding.code for finding in report.findings]) == (verdict, [])
    assert ("torch.autograd.grad" in report.next_step) == (verdict == "undetermined")


@pytest.mark.parametrize("lost", ["of a loop", "counted"])
def test_a_pass_that_the_step_counts_or_that_comes_from_the_same_line_is_lost(tmp_path: Path, lost: str) -> None:
    """Right without it is what a mean of the last microbatch alone is; what divides by all tokens is not."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            first, second = batch(0, 2 * step), batch(0, 2 * step + 1)
            if lost == "of a loop":
                for data in (first, second):
                    optimizer.zero_grad()
                    loss_of(model, data).backward()
            else:
                num_tokens = sum(int((labels != -100).sum()) for _, labels in (first, second))
                (loss_of(model, first, reduction="sum") / num_tokens).backward()
                optimizer.zero_grad()
                (loss_of(model, second, reduction="sum") / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path / "run")
    assert (report.verdict, [finding.code for finding in report.findings]) == ("findings", ["GS401"])


def test_a_first_pass_that_the_step_counts_and_loses_is_no_warm_up(tmp_path: Path) -> None:
    """Gradients are bound to other buffers behind the first backward, as to buckets in their order of arrival, and what
    it left in the old ones is forgotten."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            batches = [batch(0, 2 * step + k) for k in range(2)]
            num_tokens = sum(int((labels != -100).sum()) for _, labels in batches)
            for k, data in enumerate(batches):
                (loss_of(model, data, reduction="sum") / num_tokens).backward()
                if step == k == 0:
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = judged(tmp_path / "run").findings
    assert (finding.code, finding.step) == ("GS401", 0)


def test_steps_that_are_skipped_now_and_then_are_no_fault(tmp_path: Path) -> None:
    """A trainer that looks at the norm itself, and lets a spike go by."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(5):
            loss_of(model, batch(0, step)).backward()
            if step not in (1, 2):
                optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path / "run")
    assert report.verdict == "clean"
    assert any("skipped on purpose" in note for note in report.coverage.notes)


@pytest.mark.parametrize("divided_by", ["kept", "all"])
def test_the_rest_of_an_epoch_is_left_open_and_a_window_that_loses_its_first_pass_is_not(
    tmp_path: Path, divided_by: str
) -> None:
    """Epochs of three batches and windows of two: each recorded step begins behind a batch that filled no window."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run", steps=f"1:{STEPS}"):
        for key in range(3 * STEPS):
            window = [batch(0, (key + 1) // 3 * 3 + k) for k in range(3)]
            counted = window[1:] if divided_by == "kept" else window
            num_tokens = sum(int((labels != -100).sum()) for _, labels in counted)
            (loss_of(model, window[(key + 1) % 3], reduction="sum") / num_tokens).backward()
            if key % 3 == 1:
                optimizer.step()
            if key % 3 > 0:
                optimizer.zero_grad()
    report = judged(tmp_path / "run")
    verdict, codes = ("undetermined", []) if divided_by == "kept" else ("findings", ["GS401"])
    assert (report.verdict, [finding.code for finding in report.findings]) == (verdict, codes)
    if divided_by == "kept":
        assert "did not fill its last window" in report.reasons[0]


@pytest.mark.parametrize("first", [0, 1])
def test_a_fault_of_one_step_behind_the_rest_of_an_epoch_is_all_that_is_told(tmp_path: Path, first: int) -> None:
    """`first`: whether a step was recorded that begins behind no such batch."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run", steps=f"{first}:4"):
        for key in range(12):
            window = [batch(0, (key + 1) // 3 * 3 + k) for k in range(3)]
            num_tokens = sum(int((labels != -100).sum()) for _, labels in window[1:])
            loss_of(model, window[(key + 1) % 3], reduction="sum").backward()
            if key % 3 == 1:
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_((2 if key // 3 == 2 else 1) / num_tokens)
                optimizer.step()
            if key % 3 > 0:
                optimizer.zero_grad()
    (finding,) = judged(tmp_path / "run").findings
    assert (finding.steps, finding.factor.exact) == ([2], "2")
