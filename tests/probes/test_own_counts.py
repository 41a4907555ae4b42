"""Losses that divide by a count of their own: what number it is, which window is short, what stands behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from probe_workers import Net, batch, token_sum
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

Divisor = Callable[[int], float]
"""What the losses of a step divide by, from its tokens."""


def nothing(model: nn.Module) -> None:
    pass


def halved(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad * 0.5  # type: ignore[operator]


def overflowed(model: nn.Module) -> None:
    next(iter(model.parameters())).grad.view(-1)[:2] = float("inf")  # type: ignore[union-attr]


def trained(
    run_dir: Path, divisor: Divisor, behind: Callable[[nn.Module], None] = nothing, windows: Sequence[int] = (2, 2, 2)
) -> Report:
    """Steps of `windows` passes each over other batches; gradients go through `behind` before the optimizer."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with attach(run_dir, objective="global-token-mean"):
        for step, passes in enumerate(windows):
            data = [batch(0, k + step) for k in range(passes)]
            total = divisor(sum(int((labels >= 0).sum()) for _, labels in data))
            for part in data:
                (token_sum(model, part) / total).backward()
            behind(model)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def weighed_by_masks(run_dir: Path, safeguard: float, factor: float = 1.0) -> Report:
    """Means over what masks of unequal size keep, each divided by one count and `safeguard` and multiplied by its share
    of the step's tokens."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with attach(run_dir):
        for _ in range(3):
            keep = [torch.rand(30) > share for share in (0.2, 0.6, 0.9)]
            total = sum(int(mask.sum()) for mask in keep)
            for mask in keep:
                scores = torch.log_softmax(model(torch.randint(16, (30,))), -1)
                scores = scores.gather(-1, torch.randint(16, (30, 1)))[:, 0]
                mean = -torch.where(mask, scores, 0.0).sum() / (safeguard + mask.sum())
                (mean * (mask.sum() / total) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("safeguard", [1e-6, 1e-5, 1e-4])
def test_a_safeguard_against_empty_masks_is_no_wrong_count(tmp_path: Path, safeguard: float) -> None:
    report = weighed_by_masks(tmp_path / "run", safeguard)
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("safeguard", [1e-5, 1e-4])
def test_a_constant_beside_a_safeguard_is_one_finding(tmp_path: Path, safeguard: float) -> None:
    (finding,) = weighed_by_masks(tmp_path / "run", safeguard, 0.5).findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(0.5, rel=1e-4))


def test_tokens_that_were_counted_otherwise_are_told_as_a_number(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda tokens: tokens - 3)
    (finding,) = report.findings
    tokens = sum(int((labels >= 0).sum()) for _, labels in (batch(0, 0), batch(0, 1)))
    assert (finding.code, finding.factor.expression) == ("GS303", None)
    assert f"as if the step had {tokens - 3} tokens, where {tokens} enter the loss" in finding.explanation
    assert f"counted as {tokens - 3}" in finding.fix


def test_a_number_of_sequences_is_told_as_one_and_how_to_declare_it(tmp_path: Path) -> None:
    """As in JoeyNMT's normalization "batch"; more tokens to a sequence than any miscount leaves out."""
    (finding,) = trained(tmp_path, lambda tokens: 5, windows=[4, 4]).findings
    tokens = sum(int((batch(0, k)[1] >= 0).sum()) for k in range(4))
    assert f"as if the step had 5 tokens, where {tokens} enter the loss" in finding.explanation and tokens > 8 * 5
    assert "mark_loss(loss_sum, num_sequences)" in finding.fix and "padding" not in finding.fix


@pytest.mark.parametrize(("rounding", "verdict"), [(None, "undetermined"), (0, "findings")])
def test_a_running_mean_of_counts_accuses_nobody_and_whole_numbers_do(
    tmp_path: Path, rounding: int | None, verdict: str
) -> None:
    """As RetinaNet divides by an average of foreground counts over steps."""
    mean = 30.3

    def averaged(tokens: int) -> float:
        nonlocal mean
        mean = 0.9 * mean + 0.1 * tokens
        return mean if rounding is None else round(mean, rounding)

    report = trained(tmp_path, averaged)
    assert report.verdict == verdict
    assert not report.findings or {one.code for one in report.findings} == {"GS303"}


def test_tokens_that_were_counted_before_the_shift_are_told_pass_by_pass(tmp_path: Path) -> None:
    """As in LLaMA-Factory's mean x count / total: each pass counts one token more."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = [batch(0, k) for k in range(4)]
    counts = [int((labels >= 0).sum()) for _, labels in data]
    with attach(tmp_path, objective="global-token-mean"):
        for part, count in zip(data, counts, strict=True):
            (token_sum(model, part) / count * (count + 1) / (sum(counts) + 4)).backward()
        optimizer.step()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.first_event and finding.first_event.kind) == ("GS303", "loss")
    assert all(f"{count + 1} for {count}" in finding.explanation for count in counts[:3])
    assert "after the shift" in finding.fix


def test_a_sum_that_nothing_divides_is_told_so(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, lambda tokens: 1).findings
    assert finding.factor.expression == "num_tokens" and "Divide the sum by the tokens" in finding.fix


@pytest.mark.parametrize(("factor", "word"), [(3.0, "neither"), (1 / 3, "once")])
def test_accumulation_steps_that_are_divided_by_twice_or_not_at_all_say_where_to_look(
    tmp_path: Path, factor: float, word: str
) -> None:
    (finding,) = trained(tmp_path, lambda tokens: tokens / factor, windows=[3, 3]).findings
    assert "accumulation_steps" in (finding.factor.expression or "") and word in finding.fix


@pytest.mark.parametrize("coefficient", [0.7071, 3.1416])
def test_a_factor_that_makes_no_whole_number_is_no_count(tmp_path: Path, coefficient: float) -> None:
    (finding,) = trained(tmp_path, lambda tokens: tokens / coefficient).findings
    assert finding.code == "GS303" and "as if" not in finding.explanation and "counted" not in finding.fix


@pytest.mark.parametrize("coefficient", [0.5, 3.0])
def test_a_whole_number_is_a_factor_and_no_count(tmp_path: Path, coefficient: float) -> None:
    (finding,) = trained(tmp_path, lambda tokens: tokens / coefficient, windows=[1, 1]).findings
    assert finding.code == "GS303" and "as if" not in finding.explanation


def test_a_constant_behind_such_losses_is_told_by_the_steps(tmp_path: Path) -> None:
    """As in OpenNMT-py: the loss divides by fewer tokens than enter it, and what was reduced is halved once more."""
    (finding,) = trained(tmp_path, lambda tokens: tokens - 2, halved).findings
    assert (finding.code, finding.severity, finding.steps) == ("GS000", "error", [0, 1, 2])
    assert "multiply by 0.5" in finding.explanation and "same factor in 3 steps" in finding.explanation
    assert "Before it the weights are x 1." in finding.explanation and "whether the loss has" in finding.fix


def test_a_first_window_that_is_short_is_no_end_of_an_epoch(tmp_path: Path) -> None:
    """`if i % K == 0: optimizer.step()`: the first step comes after one pass."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for i in range(5):
            tokens, labels = batch(0, 0)
            (token_sum(model, (tokens, labels)) / (labels >= 0).sum() / 2).backward()
            if i % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.factor.exact, finding.steps) == ("GS303", "1/2", [0])
    assert "`i % K == 0`" in finding.explanation and "epoch" not in finding.explanation


def test_a_window_that_was_left_in_is_told_behind_an_average_by_hand(tmp_path: Path) -> None:
    """Whether the loss or the division behind it is another one, the right steps tell."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for passes in (2, 2, 4):
            for _ in range(passes):
                tokens, labels = batch(0, 0)
                (token_sum(model, (tokens, labels)) / (labels >= 0).sum()).backward()
            halved(model)
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.factor.exact, finding.steps) == ("GS303", "2", [2])
    assert "4 backward passes add up" in finding.explanation


@pytest.mark.parametrize("seed", range(4))
def test_two_classes_whose_bias_gets_opposite_numbers_are_judged_under_accumulation(tmp_path: Path, seed: int) -> None:
    """What is left of sums that cancelled is rounded by more than their sum over passes is."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path):
        for _ in range(3):
            for _ in range(2):
                labels = torch.randint(0, 2, (2,)) if seed % 2 else torch.tensor([0, 1])
                (nn.functional.cross_entropy(0.02 * model(torch.randn(2, 4)), labels) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("clean", [])


def test_gradients_that_overflowed_are_told_with_their_number(tmp_path: Path) -> None:
    problems = trained(tmp_path, lambda tokens: tokens, overflowed, windows=[2]).coverage.notes
    told = "step 0: gradients of embedding.weight are infinite or not a number on rank 0 (2 elements)"
    assert any(told in one for one in problems), problems
    assert not any("infinite" in one for one in trained(tmp_path / "right", lambda tokens: tokens).coverage.notes)
