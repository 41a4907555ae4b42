"""Losses that add up several means or sums over elements: what stands before a term in its sum is a coefficient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

Loss = Callable[[Tensor, Tensor, int], Tensor]
STEPS = 3
EQUAL, UNEQUAL = (5, 5, 5), (5, 6, 7)
HEADS = 2
ENTRIES = HEADS * sum(UNEQUAL)


def trained(run_dir: Path, loss: Loss, sizes: tuple[int, ...] = EQUAL) -> Report:
    """One step of batches of these sizes; `loss` gets outputs of two heads of two, targets and the pass's number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2 * HEADS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for k, size in enumerate(sizes):
            loss(model(torch.randn(size, 6)), torch.randn(size, HEADS), k).backward()
        optimizer.step()
    return diagnose(read_run(run_dir))


def near(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.mse_loss(output[:, :HEADS], target, reduction=reduction)


def far(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.l1_loss(output[:, HEADS:], target, reduction=reduction)


def divergence(output: Tensor) -> Tensor:
    return -0.5 * (1 + output - output.exp()).sum() / len(output)


RIGHT: dict[str, Loss] = {
    "two means": lambda x, y, k: (near(x, y) + 0.3 * far(x, y)) / STEPS,
    "the other first": lambda x, y, k: (0.3 * far(x, y) + near(x, y)) / STEPS,
    "divided apart": lambda x, y, k: near(x, y) / STEPS + 0.3 * far(x, y) / STEPS,
    "a sum over rows": lambda x, y, k: (near(x, y, "sum") / len(y) + 0.05 * divergence(x)) / STEPS,
    "three, one taken away": lambda x, y, k: (near(x, y) + far(x, y) - 0.01 * x.sigmoid().mean()) / STEPS,
    "both with coefficients": lambda x, y, k: (10 * near(x, y) + 0.1 * far(x, y)) / STEPS,
    "halves of one kind": lambda x, y, k: (0.5 * near(x, y) + 0.5 * near(x.roll(1, 0), y)) / STEPS,
    "a constant beside": lambda x, y, k: (near(x, y) + 0.3 * far(x, y) + 1) / STEPS,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_mean_that_nothing_multiplies_stands_for_the_whole(tmp_path: Path, name: str) -> None:
    report = trained(tmp_path, RIGHT[name])
    if name == "divided apart":  # whether 0.3 / 3 is a coefficient nobody knows
        assert (report.verdict, report.findings) == ("undetermined", [])
    else:
        assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])


@pytest.mark.parametrize("divisor", [STEPS, 1])
def test_a_number_that_is_computed_from_gradients_for_another_term_is_its_coefficient(
    tmp_path: Path, divisor: int
) -> None:
    """An adversarial loss, weighed in each pass by the norms of both losses' gradients at the last layer: looking at
    these keeps no loss apart from the passes that accumulate."""
    torch.manual_seed(0)
    model, last = nn.Sequential(nn.Linear(6, 32), nn.Tanh()), nn.Linear(32, 2 * HEADS)
    critic = nn.Linear(2 * HEADS, 1).requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), *last.parameters()], lr=0.1)
    with attach(tmp_path):
        for size in EQUAL:
            made = last(model(torch.randn(size, 6)))
            distance, fooled = near(made, torch.randn(size, HEADS)), -critic(made).mean()
            norms = [torch.autograd.grad(one, last.weight, retain_graph=True)[0].norm() for one in (distance, fooled)]
            ((distance + 0.8 * norms[0] / norms[1] * fooled) / divisor).backward()
        optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert report.findings == []
    if divisor == STEPS:
        assert (report.verdict, report.reasons) == ("clean", [])
    else:
        assert report.verdict == "undetermined"
        assert any(f"weighs x {STEPS} of what it would" in reason for reason in report.reasons), report.reasons


def test_what_stands_before_each_term_is_told(tmp_path: Path) -> None:
    (remark,) = trained(tmp_path, RIGHT["the other first"]).coverage.notes
    assert "adds up mse_loss and 0.3 x abs, as is written there, the first of which tells" in remark


def test_sums_that_are_divided_by_what_the_step_goes_over(tmp_path: Path) -> None:
    def right(output: Tensor, target: Tensor, k: int) -> Tensor:
        return near(output, target, "sum") / ENTRIES + 0.3 * far(output, target, "sum") / ENTRIES

    def undivided(output: Tensor, target: Tensor, k: int) -> Tensor:
        return near(output, target, "sum") / ENTRIES + far(output, target, "sum")

    def in_every_pass(output: Tensor, target: Tensor, k: int) -> Tensor:
        return near(output, target, "sum") / ENTRIES + 0.02 * far(output, target)

    assert trained(tmp_path / "right", right, UNEQUAL).verdict == "clean"
    for loss in (undivided, in_every_pass):
        report = trained(tmp_path / loss.__name__, loss, UNEQUAL)
        assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_division_that_is_missing_is_found(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, lambda x, y, k: near(x, y) + 0.3 * far(x, y)).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def test_a_coefficient_of_as_much_as_the_passes_hides_no_missing_division(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, lambda x, y, k: near(x, y) + far(x, y) / STEPS).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


OPEN: dict[str, Loss] = {
    "a coefficient that changes": lambda x, y, k: (near(x, y) + (k + 1) * far(x, y)) / STEPS,
    "coefficients that divide as well": lambda x, y, k: (near(x, y) / STEPS + 0.2 * far(x, y) / STEPS) / STEPS,
    "coefficients and nothing that divides": lambda x, y, k: 0.5 * near(x, y) + 0.2 * far(x, y),
    "a coefficient before the sum": lambda x, y, k: 0.5 * (near(x, y) + 0.2 * far(x, y)) / STEPS,
    "one number before each": lambda x, y, k: (1.5 * near(x, y) + 1.5 * near(x.roll(1, 0), y)) / STEPS,
    "one mean twice": lambda x, y, k: ((mean := near(x, y)) + 0.5 * mean) / STEPS,
    "elements of both": lambda x, y, k: ((d := (x[:, :HEADS] - y).square()).mean() + 0.1 * d.sum()) / STEPS,
    "a learned weight": lambda x, y, k: (near(x, y) + x.mean() * far(x, y)) / STEPS,
    "one pass twice": lambda x, y, k: (near(x, y) + 0.3 * far(x, y)) / STEPS * (1 + (k == 1)),
    "a mean of as many terms as passes": lambda x, y, k: (near(x, y) + far(x, y) + x.sigmoid().mean()) / STEPS,
    "divided twice": lambda x, y, k: (near(x, y) + 0.3 * far(x, y)) / STEPS / STEPS,
}


@pytest.mark.parametrize("name", OPEN)
def test_what_is_not_known_is_left_open(tmp_path: Path, name: str) -> None:
    report = trained(tmp_path, OPEN[name])
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_sum_that_is_divided_twice_by_what_its_source_calls_accumulation_is_found(tmp_path: Path) -> None:
    accum = STEPS
    (finding,) = trained(tmp_path, lambda x, y, k: (near(x, y) + 0.3 * far(x, y)) / accum / accum).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")


def test_by_how_much_passes_differ_is_told(tmp_path: Path) -> None:
    (reason,) = trained(tmp_path, OPEN["one pass twice"]).reasons
    assert "weighs x 2 in accumulation step 1 and x 1 elsewhere of what it would in their average" in reason
    assert "(* (1 + (k == 1))) multiplies the loss by" in reason


def test_real_and_generated_data_in_one_root_accuse_nobody(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor, k: int) -> Tensor:
        real, generated = output[:, :HEADS], output[:, HEADS:]
        bce = F.binary_cross_entropy_with_logits
        return bce(real, torch.ones_like(real)) + bce(generated, torch.zeros_like(generated))

    report = trained(tmp_path, loss)
    assert (report.verdict, report.findings) == ("undetermined", [])
