"""What forward passes show is seen in the first recorded step as well where earlier ones are not recorded: the forward
pass runs before anything of that step is known to have begun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes.session import attach
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

GATHERED = {
    "right": ("clean", []),
    "flat": ("clean", []),
    "bfloat16": ("clean", []),
    "handed on": ("clean", []),
    "flat, halved": ("findings", [("GS101", "1/accumulation_steps")]),
}


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    warm_up()


def test_parameters_that_a_function_gathers(tmp_path: Path) -> None:
    results = launch("gathered_workers:run", (list(GATHERED), str(tmp_path), 1), 3, timeout_s=90)
    assert all(bare == recorded for of_rank in results for bare, recorded in of_rank)
    reports = {variant: diagnose(read_run(tmp_path / variant)) for variant in GATHERED}
    found = {
        variant: (report.verdict, [(one.code, one.factor.expression) for one in report.findings])
        for variant, report in reports.items()
    }
    assert found == GATHERED
    assert all(report.run.steps[0] == 1 for report in reports.values())


def test_experts_between_exchanges(tmp_path: Path) -> None:
    launch("lone_expert_workers:train_gained", (str(tmp_path / "run"), 2.0, 1), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings, report.run.steps) == ("undetermined", [], [1, 2])
    assert report.reasons[0].startswith("the gradients of expert.gain are not reduced")


def test_a_head_in_parts_behind_a_gather(tmp_path: Path) -> None:
    launch("parted_head_workers:train", (str(tmp_path / "run"), "one seed", 1), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings, report.run.steps) == ("undetermined", [], [1, 2])


@pytest.mark.parametrize("divided_by", [1, 3])
def test_a_loss_whose_gradient_another_pass_hands_on(tmp_path: Path, divided_by: int) -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(6, 8), nn.Linear(8, 10)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with attach(tmp_path, steps=[1, 2]):
        for _ in range(3):
            hidden = body(torch.randn(5, 6))
            cut = hidden.detach().requires_grad_()
            (nn.functional.cross_entropy(head(cut), torch.randint(0, 10, (5,))) / divided_by).backward()
            hidden.backward(cut.grad)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert [(one.code, one.num_parameters) for one in report.findings] == ([("GS303", 4)] if divided_by > 1 else [])
    assert report.verdict == ("findings" if divided_by > 1 else "clean"), report.reasons


@pytest.mark.parametrize("divided_by", [2, 3])
@pytest.mark.parametrize("adaptive", [False, True])
def test_losses_of_log_probabilities(tmp_path: Path, adaptive: bool, divided_by: int) -> None:
    """The first pass of the first recorded step has a loss like all others."""
    torch.manual_seed(0)
    body, head = nn.Linear(6, 16), nn.Linear(16, 20)
    several = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])
    optimizer = torch.optim.SGD([*body.parameters(), *(several if adaptive else head).parameters()], lr=0.1)
    with attach(tmp_path, steps=[1, 2]):
        for _ in range(3):
            for _ in range(2):
                x, labels = torch.randn(8, 6), torch.randint(0, 20, (8,))
                if adaptive:
                    loss = several(body(x), labels).loss
                else:
                    loss = -head(body(x)).log_softmax(-1).gather(1, labels[:, None]).mean()
                (loss / divided_by).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    found = [(one.code, one.steps, one.factor.exact) for one in report.findings]
    assert found == ([("GS303", [1, 2], "2/3")] if divided_by == 3 else []), report.reasons
    assert report.verdict == ("findings" if divided_by == 3 else "clean")
