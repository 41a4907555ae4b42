"""Lines of the trainer's that multiply gradients by a number of their own, behind losses that are bare sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from probe_workers import Net, batch, token_sum
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

PASSES, STEPS = 2, 3
Behind = Callable[[nn.Module, list[int], torch.optim.Optimizer], None]
"""What a trainer does behind the last pass, given each pass's tokens."""


def scaled(model: nn.Module, factor: float, first: int = 0) -> None:
    for param in list(model.parameters())[first:]:
        param.grad.mul_(factor)  # type: ignore[union-attr]


def trained(run: Path, behind: Behind, divisor: Callable[[int], float] = lambda tokens: 1.0) -> Report:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run, steps=range(STEPS)):
        for step in range(STEPS):
            data = [batch(0, PASSES * step + k) for k in range(PASSES)]
            counts = [int((labels >= 0).sum()) for _, labels in data]
            for part in data:
                (token_sum(model, part) / divisor(sum(counts))).backward()
            behind(model, counts, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


def line_of(finding: Finding) -> str:
    event = finding.first_event
    assert event is not None and event.line is not None
    return Path(str(event.file)).read_text().splitlines()[event.line - 1]


def test_a_division_by_all_tokens_is_clean(tmp_path: Path) -> None:
    assert trained(tmp_path, lambda model, counts, _: scaled(model, 1 / sum(counts))).verdict == "clean"


@pytest.mark.parametrize(
    ("factor", "code"),
    [
        (lambda counts: 1 / counts[-1], "GS305"),
        (lambda counts: 0.5 / sum(counts), "GS000"),
        (lambda counts: 3 / sum(counts), "GS000"),
        (lambda counts: 1 / (sum(counts) + counts[0]), "GS000"),
        (lambda counts: sum(counts), "GS000"),
    ],
)
def test_a_wrong_count_is_laid_to_its_line_and_not_to_the_sums_before_it(
    tmp_path: Path, factor: Callable[[list[int]], float], code: str
) -> None:
    report = trained(tmp_path, lambda model, counts, _: scaled(model, factor(counts)))
    assert {finding.code for finding in report.findings} == {code}
    assert "mul_(factor)" in line_of(report.findings[0])
    assert "It or the loss is to blame" not in report.findings[0].explanation


def test_one_number_in_all_steps_is_a_constant_whatever_the_weights_are_off_by(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda model, counts, _: scaled(model, PASSES))
    assert report.verdict == "findings"
    assert {finding.code for finding in report.findings} == {"GS000"}


def test_a_parameter_that_is_left_out_is_told_with_the_line_that_does_it_to_the_others(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, lambda model, counts, _: scaled(model, 1 / sum(counts), first=1)).findings
    assert finding.num_parameters == 1
    assert "are left as they were" in finding.explanation and "by this line" in finding.explanation
    assert "mul_(factor)" in line_of(finding)


def test_a_step_for_each_parameter_leaves_the_verdict_open(tmp_path: Path) -> None:
    def stepped(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad.mul_(1 / sum(counts))  # type: ignore[union-attr]
            optimizer.step()

    report = trained(tmp_path, stepped)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("which were changed in between" in reason for reason in report.reasons)


def test_a_second_step_on_the_same_gradients_leaves_the_verdict_open(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda model, counts, optimizer: optimizer.step(), divisor=float)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("step 2 times" in reason and "applies them as often" in reason for reason in report.reasons)


def test_losses_that_are_divided_by_nothing_at_all_are_told(tmp_path: Path) -> None:
    zero = torch.zeros(())
    report = trained(tmp_path, lambda model, counts, _: None, divisor=lambda tokens: zero)  # type: ignore[arg-type, return-value]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("divided by a count that is zero" in reason for reason in report.reasons)
    assert not any("please report it" in reason for reason in report.reasons)


def clipped(model: nn.Module, max_norm: float, *, seen: bool) -> None:
    """`seen`: the norm is taken by a function that probes watch."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = torch.stack([grad.norm() if seen else (grad * grad).sum().sqrt() for grad in grads]).square().sum().sqrt()
    for grad in grads:
        grad.mul_(max_norm / float(norm))


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("order", ["before", "behind"])
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_one_parameter_that_is_scaled_beside_a_clip_by_hand_is_told_with_its_own_line(
    tmp_path: Path, factor: float, order: str, seen: bool
) -> None:
    def doing(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
        one = next(model.parameters()).grad
        assert one is not None
        if order == "before":
            one.mul_(factor)
        clipped(model, 0.05, seen=seen)
        if order == "behind":
            one.mul_(factor)

    (finding,) = trained(tmp_path, doing, float).findings
    assert (finding.code, finding.num_parameters) == ("GS000", 1)
    assert finding.factor.observed == pytest.approx(factor, rel=1e-4)
    assert line_of(finding).strip() == "one.mul_(factor)"


def test_behind_a_clip_to_a_norm_that_nobody_writes_the_line_that_sets_a_parameter_apart_is_told(
    tmp_path: Path,
) -> None:
    def doing(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
        clipped(model, 0.051374, seen=True)
        one = next(model.parameters()).grad
        assert one is not None
        one.mul_(0.5)

    (finding,) = trained(tmp_path, doing, float).findings
    assert (finding.code, line_of(finding).strip()) == ("GS000", "one.mul_(0.5)")


@pytest.mark.parametrize("seen", [True, False])
def test_a_clip_by_hand_beside_parameters_that_are_clipped_by_their_own_norm_accuses_nobody(
    tmp_path: Path, seen: bool
) -> None:
    def doing(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
        clipped(model, 0.05, seen=seen)
        one = next(model.parameters()).grad
        assert one is not None
        one.mul_(0.00137 / float(one.norm()))

    assert trained(tmp_path / "right", lambda model, *_: clipped(model, 0.05, seen=seen), float).verdict == "clean"
    report = trained(tmp_path / "own", doing, float)
    assert (report.verdict, report.findings) == ("undetermined", [])


def shortened(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
    clipped(model, 0.05, seen=True)
    for param in model.parameters():
        param.grad.mul_(0.3)  # type: ignore[union-attr]


def to_unit_length(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
    clipped(model, 1.0, seen=True)
    for param in model.parameters():
        param.grad.mul_(0.05)  # type: ignore[union-attr]


def in_two_lines(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
    norm = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    for param in model.parameters():
        param.grad.mul_(0.05)  # type: ignore[union-attr]
    for param in model.parameters():
        param.grad.div_(norm)  # type: ignore[union-attr]


def divided(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
    clipped(model, 0.05, seen=True)
    for param in model.parameters():
        param.grad.div_(3)  # type: ignore[union-attr]


def in_groups(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad.mul_(0.1 if param.dim() == 1 else 0.7)  # type: ignore[union-attr]
    clipped(model, 0.05, seen=False)


@pytest.mark.parametrize(
    ("doing", "factor", "line"),
    [(shortened, 0.3, "mul_(0.3)"), (divided, 1 / 3, "div_(3)"), (in_groups, 1 / 7, "mul_(0.1 if")],
)
def test_numbers_of_the_program_beside_a_clip_by_hand_are_no_part_of_it(
    tmp_path: Path, doing: Behind, factor: float, line: str
) -> None:
    (finding,) = trained(tmp_path, doing, float).findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(factor, rel=1e-4))
    assert f"param.grad.{line}" in line_of(finding)


@pytest.mark.parametrize("doing", [to_unit_length, in_two_lines])
def test_a_clip_of_two_lines_is_clean(tmp_path: Path, doing: Behind) -> None:
    assert trained(tmp_path, doing, float).verdict == "clean"


def test_sums_that_are_clipped_and_divided_by_tokens_behind_it_are_left_open(tmp_path: Path) -> None:
    def doing(model: nn.Module, counts: list[int], optimizer: torch.optim.Optimizer) -> None:
        clipped(model, 0.95, seen=True)
        for param in model.parameters():
            param.grad.div_(sum(counts))  # type: ignore[union-attr]

    report = trained(tmp_path, doing)
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize(("rate", "found"), [(0.65, False), (-0.1, False), (-0.5, False), (0.5, True)])
def test_a_rate_that_hooks_give_a_parameter_is_open_where_no_count_makes_it(
    tmp_path: Path, rate: float, found: bool
) -> None:
    model = Net()
    next(model.parameters()).register_hook(lambda grad: grad * rate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(2):
            passes = [batch(0, 2 * step + k) for k in range(2)]
            num_tokens = sum(int((labels != -100).sum()) for _, labels in passes)
            for tokens, labels in passes:
                (token_sum(model, (tokens, labels)) / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert report.verdict == ("findings" if found else "undetermined")
    assert any(f"x {rate:.4g}" in reason for reason in report.reasons) is not found


@pytest.mark.parametrize("lacks", [False, True])
def test_a_hook_that_one_parameter_lacks_is_told_beside_a_line_that_does_as_much(tmp_path: Path, lacks: bool) -> None:
    model = Net()
    for param in list(model.parameters())[lacks:]:
        param.register_hook(lambda grad: grad * 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(2):
            passes = [batch(0, 2 * step + k) for k in range(2)]
            num_tokens = sum(int((labels != -100).sum()) for _, labels in passes)
            for each in passes:
                (4 * token_sum(model, each) / num_tokens).backward()
            scaled(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
    found = diagnose(read_run(tmp_path / "run")).findings
    assert len(found) == lacks
    if lacks:
        assert found[0].first_event is not None and found[0].first_event.kind == "backward"
        assert "are left as they were" in found[0].explanation and found[0].num_parameters == 1
