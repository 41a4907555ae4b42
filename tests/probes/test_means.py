"""Losses that are means and count nothing: a division that is missing is found where no coefficient can be meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import LossGradient
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

NUM_BATCHES = 3
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "huber": F.huber_loss,
    "by hand": lambda output, target: ((output - target) ** 2).mean(),
    "bce": lambda output, target: F.binary_cross_entropy_with_logits(
        output, (target > 0).float(), pos_weight=torch.full((4,), 2.0)
    ),
    "triplet": lambda output, target: F.triplet_margin_loss(output, target, target.roll(1, 0)),
    "ranking": lambda output, target: F.margin_ranking_loss(output[:, 0], output[:, 1], target[:, 0].sign()),
}


def trained(
    run_dir: Path,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    factors: tuple[float, ...] = (),
    scale: float | None = None,
    together: bool = False,
    sizes: tuple[int, ...] = (5, 5, 5),
) -> Report:
    """One step of batches of these sizes, each loss times some numbers and a loss scale. `together`: all losses are
    computed before the first is differentiated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with attach(run_dir):
        batches = [(torch.randn(size, 6), torch.randn(size, 4)) for size in sizes]
        waiting = [loss(model(inputs), target) for inputs, target in batches] if together else []
        for index, (inputs, target) in enumerate(batches):
            value = waiting[index] if together else loss(model(inputs), target)
            for factor in factors:
                value = value * factor
            scaler.scale(value).backward(retain_graph=together)
        scaler.step(optimizer)
        scaler.update()
    return diagnose(read_run(run_dir))


def test_what_a_closure_that_empties_nothing_adds_up_is_stale_and_no_accumulation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs, target = nn.Linear(6, 4), torch.randn(5, 6), torch.randn(5, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        return loss

    with attach(tmp_path):
        for _ in range(2):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert [finding.code for finding in diagnose(read_run(tmp_path)).findings] == ["GS402"]


@pytest.mark.parametrize(("divided", "codes"), [(False, ["GS303"]), (True, [])])
def test_a_loss_scale_by_hand_hides_no_missing_division(tmp_path: Path, divided: bool, codes: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for _ in range(NUM_BATCHES):
            value = F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 4))
            (value / (NUM_BATCHES if divided else 1) * 1024).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(1024)
        optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert [finding.code for finding in report.findings] == codes
    assert codes or report.verdict == "clean"
    for finding in report.findings:
        assert finding.factor.expression == "accumulation_steps"


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("loss", LOSSES)
def test_means_that_nobody_divides_are_found(tmp_path: Path, loss: str, scale: float | None) -> None:
    (finding,) = trained(tmp_path / "wrong", LOSSES[loss], scale=scale, sizes=(5, 6, 7)).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")
    assert "means that count nothing" in finding.explanation
    right = trained(tmp_path / "right", LOSSES[loss], (1 / NUM_BATCHES,), scale, sizes=(5, 6, 7))
    assert (right.verdict, right.findings) == ("undetermined", [])


@pytest.mark.parametrize(
    ("factors", "together"),
    [((3.0, 1 / 3), False), ((0.5,), False), ((1.0,), False), ((3.0,), False), ((1 / 3, 1 / 3), False), ((), True)],
    ids=[
        "coefficient, divided",
        "coefficient",
        "coefficient of one",
        "coefficient like the number",
        "divided twice",
        "losses of one forward",
    ],
)
def test_what_may_be_a_coefficient_or_tasks_accuses_nobody(
    tmp_path: Path, factors: tuple[float, ...], together: bool
) -> None:
    report = trained(tmp_path, factors=factors, together=together)
    assert (report.verdict, report.findings) == ("undetermined", [])


HALVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "half squared": lambda output, target: (0.5 * (output - target) ** 2).mean(),
    "a number before each element": lambda output, target: (0.7 * (output - target) ** 2).mean(),
    "halved": lambda output, target: ((output - target) ** 2 / 2).mean(),
}


@pytest.mark.parametrize("loss", HALVES)
def test_a_number_before_each_element_is_a_part_of_what_its_mean_goes_over(tmp_path: Path, loss: str) -> None:
    assert trained(tmp_path / "right", HALVES[loss], (1 / NUM_BATCHES,)).verdict == "clean"
    (finding,) = trained(tmp_path / "wrong", HALVES[loss]).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize("sizes", [(5, 5), (5, 5, 5, 5)])
def test_a_half_before_each_element_may_be_a_part_of_a_division_by_even_passes(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    report = trained(tmp_path, HALVES["half squared"], sizes=sizes)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert f"weighs x {len(sizes)} of what it would in their average" in report.reasons[0]


def divided_in_part(run_dir: Path, divide: Callable[[Tensor, int], Tensor]) -> Report:
    """One step of three equal batches, of which the n-th loss is `divide(loss, n)`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for index in range(NUM_BATCHES):
            divide(F.mse_loss(model(torch.randn(5, 6)), torch.randn(5, 4)), index).backward()
        optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("bare", [{2}, {0}, {0, 1}])
def test_means_of_which_only_some_are_divided_are_found(tmp_path: Path, bare: set[int]) -> None:
    report = divided_in_part(tmp_path, lambda loss, index: loss if index in bare else loss / NUM_BATCHES)
    (finding,) = report.findings
    assert (finding.code, finding.factor.expression) == ("GS000", "accumulation_steps")
    ratios = {one.contribution.accumulation_step: round(one.ratio or 0, 4) for one in report.weights}
    assert ratios == {index: 3 if index in bare else 1 for index in range(NUM_BATCHES)}


@pytest.mark.parametrize("numbers", [(1.0, 1 / 3, 1 / 3), (1.0, 0.5, 1 / 3)], ids=["that look like it", "of any size"])
def test_numbers_of_the_passes_own_accuse_nobody(tmp_path: Path, numbers: tuple[float, ...]) -> None:
    report = divided_in_part(tmp_path, lambda loss, index: loss * numbers[index])
    assert (report.verdict, report.findings) == ("undetermined", [])


def real_and_generated(run_dir: Path, kind: str) -> Report:
    """A discriminator's step on real and on generated data: two losses that add up by design."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    real, fake = torch.randn(5, 6) + 2, torch.randn(5, 6)

    def push(data: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        loss(model(data), target).backward()

    with attach(run_dir):
        if kind == "one line":
            push(real, torch.rand(5, 1), F.mse_loss), push(fake, torch.rand(5, 1), F.mse_loss)
        elif kind == "two lines":
            push(real, torch.rand(5, 1), LOSSES["by hand"])
            push(fake, torch.rand(5, 1), LOSSES["by hand"])
        elif kind == "distance":
            for data, label in ((real, 1.0), (fake, 0.0)):
                push(data, torch.full((5, 1), label), LOSSES["by hand"])
        elif kind == "distance, summed":
            for data, label in ((real, 1.0), (fake, 0.0)):
                push(data, torch.full((5, 1), label), lambda output, target: ((output - target) ** 2).sum() / 5)
        elif kind == "noisy labels":
            for data, label in ((real, 0.9), (fake, 0.0)):
                push(data, label + 0.1 * torch.rand(5, 1), F.binary_cross_entropy_with_logits)
        else:
            for data, label in ((real, 1.0), (fake, 0.0)):
                push(data, torch.full((5, 1), label), F.binary_cross_entropy_with_logits)
        optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("kind", ["one line", "two lines", "loop", "distance", "distance, summed", "noisy labels"])
def test_losses_of_several_kinds_that_add_up_accuse_nobody(tmp_path: Path, kind: str) -> None:
    report = real_and_generated(tmp_path, kind)
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize(
    "missed",
    [F.relu, lambda gap: gap.clamp(min=0), lambda gap: gap.clamp_min(0), lambda gap: -F.logsigmoid(-gap)],
)
def test_hinges_of_several_kinds_of_data_that_add_up_accuse_nobody(
    tmp_path: Path, missed: Callable[[Tensor], Tensor]
) -> None:
    """A conditional discriminator's: real, generated and mismatched pairs, told by a sign that is a plain number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for sign in (1, -1, -1):
            missed(1 - sign * model(torch.randn(5, 6))).mean().backward()
        optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])


TO_ONE_NUMBER: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a number": lambda output, label: ((output - label) ** 2).mean(),
    "a number, from": lambda output, label: ((label - output) ** 2).mean(),
    "its opposite": lambda output, label: (output + label).square().mean(),
    "a tensor of it": lambda output, label: (output - torch.full_like(output, label)).pow(2).mean(),
    "from a tensor of it": lambda output, label: (torch.full((5, 1), label) - output).abs().mean(),
    "zero": lambda output, label: (output.squeeze(1) ** 2).mean() if label < 0 else ((1 - output) ** 2).mean(),
    "torch's own": lambda output, label: F.l1_loss(output, torch.full_like(output, label)),
    "summed": lambda output, label: ((output - label) ** 2).sum() / 5,
}


@pytest.mark.parametrize("distance", TO_ONE_NUMBER)
def test_distances_from_one_number_on_several_kinds_of_data_accuse_nobody(tmp_path: Path, distance: str) -> None:
    """Those of a discriminator (least squares) that is given real, generated and mismatched pairs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, steps={0, 2}):  # what a step's first pass subtracts comes before anything begins that step
        for _ in range(3):
            for label in (1.0, -1.0, -1.0):
                TO_ONE_NUMBER[distance](model(torch.randn(5, 6)), label).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = read_run(tmp_path)
    weights = [event.mean_weight for event in run.ranks[0].events if isinstance(event, LossGradient)]
    assert len(weights) == 6
    assert all(weight is None or math.isnan(weight) for weight in weights)  # an accelerator tells late that it is none
    report = diagnose(run)
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_loss_scale_that_is_taken_out_twice_is_told_however_little_it_leaves(tmp_path: Path) -> None:
    """Weights of a learned curve are only compared with one another: of what they come to next to nothing is left."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=2.0**16) for _ in range(2))
    with attach(tmp_path / "run"):
        for _ in range(2):
            scaler.scale(F.softplus(model(torch.randn(5, 6))).mean()).backward()
            other.scale(torch.ones(()))
            other.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            other.update()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert not any("does not fit together" in reason for reason in report.reasons), report.reasons


@pytest.mark.parametrize("in_place", [True, False])
def test_a_scale_near_one_that_is_taken_out_again_is_nobodys_fault(tmp_path: Path, in_place: bool) -> None:
    """A loss scale that grows by a part of a thousandth: what is left of scaled gradients is no documented 1."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(3):
            scale = 2.0 ** (step * 3e-4)
            for _ in range(2):
                output = model(torch.randn(5, 6))
                ((output * output.detach().sigmoid()).sum(dim=1).exp() * scale).mean().backward()
            for param in model.parameters():
                assert param.grad is not None
                if in_place:
                    param.grad.mul_(1 / scale)
                else:
                    param.grad = param.grad / scale
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
