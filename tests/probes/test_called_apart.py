"""Two tasks of one batch whose losses come from one function of the program's, as of knowledge graphs (the tail, and
the head of a triple), and a loop over microbatches that calls such a function from two branches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes.session import attach

Step = Callable[[nn.Module, Callable[[], tuple[Tensor, Tensor]]], None]
TOKENS, NUM_CLASSES = 8, 5


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), labels, reduction="sum") / TOKENS


def _tasks(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
    inputs, labels = batch()
    tail = _loss(model, inputs, labels)
    tail.backward()
    _, heads = batch()
    head = _loss(model, -inputs, heads)
    head.backward()


def _parts_of_tasks(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
    inputs, labels = batch()
    _, heads = batch()
    for part in (slice(0, 3), slice(3, TOKENS)):
        tail = _loss(model, inputs[part], labels[part])
        tail.backward()
        head = _loss(model, -inputs[part], heads[part])
        head.backward()


def _one_call(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
    for index in range(2):
        loss = _loss(model, *batch())
        if index == 0:
            loss.backward()
        else:
            whole = loss
            whole.backward()


def _branches(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]]) -> None:
    for index in range(2):
        inputs, labels = batch()
        if index == 1:
            loss = _loss(model, inputs, labels)
            loss.backward()
        else:
            with nullcontext():
                loss = _loss(model, inputs, labels)
                loss.backward()


def _judged(folder: Path, step: Step) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(TOKENS, 6), torch.randint(0, NUM_CLASSES, (TOKENS,))

    with attach(folder):
        for _ in range(3):
            optimizer.zero_grad()
            step(model, batch)
            optimizer.step()
    return gradcheck_dist.diagnose(folder)


def test_a_function_that_is_called_for_each_task_computes_a_loss_for_each(tmp_path: Path) -> None:
    for name, step in (("whole", _tasks), ("parts", _parts_of_tasks)):
        report = _judged(tmp_path / name, step)
        assert report.verdict == "undetermined", report.findings
        assert "weigh x 1 and x 1 of a mean over their own tokens" in report.reasons[0]


def test_microbatches_of_one_call_or_of_branches_that_call_the_same_lack_a_division(tmp_path: Path) -> None:
    for name, step in (("one call", _one_call), ("branches", _branches)):
        report = _judged(tmp_path / name, step)
        assert [finding.code for finding in report.findings] == ["GS303"], (name, report.reasons)
        assert report.findings[0].factor.exact == "2"
