"""Every step recorded without samples: nothing of training changes, and what is recorded is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Clip, Loss, LossGradient, OptimizerStep
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.columns import expand
from gradcheck_dist.trace.run import read_run


def train(steps: int, wrong: int | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        batches = [(torch.randn(n, 8), torch.randint(0, 5, (n,))) for n in (7, 3)]
        total = sum(len(labels) for _, labels in batches)
        for x, labels in batches:
            loss = F.cross_entropy(model(x), labels, reduction="sum") / total
            if step == wrong:
                loss = loss / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_training_is_the_same_bit_by_bit_and_every_step_is_there(tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run", steps=range(1, 3), every_step=True):
        watched = train(9)
    assert all(torch.equal(a, b) for a, b in zip(watched, train(9), strict=True))
    trace = read_run(tmp_path / "run").ranks[0]
    steps = {step: of for block in trace.columns for step, of in expand(trace.shapes[block.shape], block)}
    assert sorted(steps) == [0, *range(3, 9)]
    assert {samples.step for samples in trace.samples} == {1, 2}
    assert {event.step for event in trace.events if isinstance(event, OptimizerStep)} == {1, 2}
    for events in steps.values():
        assert [event.num_tokens for event in events if isinstance(event, Loss)] == [7, 3]
        assert [event.weight for event in events if isinstance(event, LossGradient)] == [torch.tensor(0.1).item()] * 2
        assert len({event.total_norm for event in events if isinstance(event, Clip)}) == 1
        assert [event.seq for event in events] == sorted(event.seq for event in events)


def test_a_step_that_went_wrong_between_the_recorded_ones_is_found(tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run", steps=range(2), every_step=True, objective="global-token-mean"):
        train(12, wrong=7)
    report = diagnose_run(tmp_path / "run")
    [finding] = report.findings
    assert finding.steps == [7]
    assert finding.factor.exact == "1/2"
    assert finding.first_event is not None
    assert finding.first_event.file == __file__
    assert report.run.steps == [0, 1]


def test_without_a_fault_the_run_is_clean(tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run", steps=range(2), every_step=True, objective="global-token-mean"):
        train(6)
    report = diagnose_run(tmp_path / "run")
    assert (report.verdict, report.reasons) == ("clean", [])
    # Its curves are those of a run of which every step was sampled.
    with gradcheck_dist.attach(tmp_path / "whole", steps=range(6), objective="global-token-mean"):
        train(6)
    whole = diagnose_run(tmp_path / "whole")
    assert set(report.metrics) == {"loss", "num_tokens", "grad_norm"}
    for name in report.metrics:
        assert report.series(name) == [(step, pytest.approx(value)) for step, value in whole.series(name)]
        assert [step for step, _ in report.series(name)] == list(range(6))


def without_tokens(
    run_dir: Path, loss: Callable[[torch.Tensor], torch.Tensor], divisors: Sequence[float], last_size: int = 4
) -> Report:
    """Steps of three passes, each step's losses divided by a number where it is not 1; the first two steps are sampled.
    `last_size`: of the last batch of the last step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_dist.attach(run_dir, steps=range(2), every_step=True):
        for step, divisor in enumerate(divisors):
            for size in (4, 4, last_size if step == len(divisors) - 1 else 4):
                value = loss(model(torch.randn(size, 8)))
                (value if divisor == 1 else value / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(run_dir)


TARGETS = torch.arange(20.0).reshape(4, 5) / 10
MEANS = {
    "errors": lambda output: ((output - TARGETS[: len(output)]) ** 2).mean(),
    "a sum": lambda output: (output**2).sum() / output.numel(),
    "margins": lambda output: F.relu(1 - output).mean(),
    "a gain": lambda output: -output.sigmoid().mean(),
}


@pytest.mark.parametrize("loss", MEANS)
def test_a_mean_that_counts_no_tokens_is_judged_by_its_elements(loss: str, tmp_path: Path) -> None:
    report = without_tokens(tmp_path / "right", MEANS[loss], [3.0] * 4)
    assert (report.verdict, report.reasons) == ("clean", [])
    assert any(
        "documented weights of 2 steps (6 contributions) were compared" in note for note in report.coverage.notes
    )
    assert report.metrics["num_tokens"] == [60.0] * 4
    for off in (
        without_tokens(tmp_path / "wrong", MEANS[loss], [3.0, 3.0, 1.0, 3.0]),
        without_tokens(tmp_path / "unequal", MEANS[loss], [3.0] * 4, last_size=2),
    ):
        assert (off.verdict, off.findings) == ("undetermined", [])
        assert "off as documented, where losses count no tokens" in off.reasons[0]


def test_steps_that_lack_the_division_of_measured_ones_belong_to_their_finding(tmp_path: Path) -> None:
    (finding,) = without_tokens(tmp_path, MEANS["errors"], [1.0] * 5).findings
    assert finding.steps == [0, 1, 2, 3, 4]


def test_losses_that_count_no_tokens_are_the_one_reason_where_there_are_no_samples(tmp_path: Path) -> None:
    report = without_tokens(tmp_path, lambda output: (output**2).mean() + output.abs().mean(), [3.0] * 4)
    [reason] = [one for one in report.reasons if "without samples" in one]
    assert reason.startswith("2 steps recorded without samples cannot be judged: a loss counts no tokens")
    assert "--every N" in reason


def test_steps_that_are_off_by_what_only_samples_show_are_not_laid_to_a_measured_fault(tmp_path: Path) -> None:
    """All are off as documented by a division of gradients; the measured one holds what an earlier step left, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gradcheck_dist.attach(tmp_path / "run", steps=range(2, 3), every_step=True):
        for step in range(6):
            for _ in range(2):
                F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 5, (6,)), reduction="sum").backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad.mul_(1 / 12)
            optimizer.step()
            if step != 1:
                optimizer.zero_grad()
    report = diagnose_run(tmp_path / "run")
    assert [(finding.code, finding.steps) for finding in report.findings] == [("GS402", [2])]
    assert any("in which other weights were measured" in reason for reason in report.reasons)
