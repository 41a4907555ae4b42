"""Gradients of losses without labels that are emptied between passes: what modules are given, and targets, tell whether
the same batch was evaluated again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import events_of, judged
from torch import Tensor, nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.recording import module_calls

Batch = tuple[Tensor, Tensor]
PASSES = 3
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "by hand": lambda output, target: (output - target).square().mean(),
    "the reverse": lambda output, target: (target - output).pow(2).mean(),
    "bce": lambda output, target: F.binary_cross_entropy_with_logits(output, target.sigmoid()),
    "distance": nn.L1Loss(),
    "huber": lambda output, target: F.huber_loss(output, target, reduction="none").mean(),
}


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train(folder: Path, batches: Callable[[int], Iterator[Batch]], loss: str, call: Callable[..., Tensor]) -> Report:
    """Steps whose gradients are emptied in front of every pass; `batches` of one step."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(folder / "run"):
        for step in range(3):
            for inputs, target in batches(step):
                optimizer.zero_grad()
                LOSSES[loss](call(model, inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder / "run")


def plainly(model: nn.Module, inputs: Tensor) -> Tensor:
    output: Tensor = model(inputs)
    return output


def others(_: int) -> Iterator[Batch]:
    return ((torch.randn(6, 8), torch.randn(6, 4)) for _ in range(PASSES))


def again(_: int) -> Iterator[Batch]:
    batch = torch.randn(6, 8), torch.randn(6, 4)
    return iter([batch] * 2)


def constant(_: int) -> Iterator[Batch]:
    return ((torch.randn(6, 8), torch.ones(6, 4)) for _ in range(PASSES))


def moved(_: int) -> Iterator[Batch]:
    """As an adversary moves inputs."""
    inputs, target = torch.randn(6, 8), torch.randn(6, 4)
    return iter([(inputs, target), (inputs + 0.1 * torch.randn(6, 8), target)])


def noisy(_: int) -> Iterator[Batch]:
    """As a teacher with dropout gives them."""
    inputs, target = torch.randn(6, 8), torch.randn(6, 4)
    return iter([(inputs, target), (inputs, target + 0.1 * torch.randn(6, 4))])


@pytest.mark.parametrize("loss", LOSSES)
def test_emptied_gradients_of_other_batches_are_lost(tmp_path: Path, loss: str) -> None:
    (finding,) = train(tmp_path, others, loss, plainly).findings
    assert (finding.code, finding.steps) == ("GS401", [0, 1, 2])
    assert finding.first_event is not None and finding.first_event.kind == "zero_grad"


@pytest.mark.parametrize("loss", ["mse", "by hand"])
def test_a_batch_that_is_evaluated_again_loses_nothing(tmp_path: Path, loss: str) -> None:
    report = train(tmp_path, again, loss, plainly)
    assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])


@pytest.mark.parametrize("batches", [moved, noisy, constant])
def test_the_same_inputs_or_targets_alone_leave_it_open(
    tmp_path: Path, batches: Callable[[int], Iterator[Batch]]
) -> None:
    report = train(tmp_path, batches, "mse", plainly)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("do not tell whether the same batch was evaluated again" in reason for reason in report.reasons)


@pytest.mark.parametrize("counted", [True, False])
def test_parameters_that_are_moved_in_between_leave_it_open(tmp_path: Path, counted: bool) -> None:
    """Sharpness-aware training of what draws its noise anew. `counted`: autograd sees that parameters are changed."""

    def perturbed(model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            for param in model.parameters():
                (param if counted else param.data).add_(1e-3)
        return plainly(model, inputs)

    report = train(tmp_path, others, "mse", perturbed)
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_pass_on_a_line_of_its_own_is_left_open(tmp_path: Path) -> None:
    """Statistics of gradients on a batch of their own."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for _ in range(3):
            F.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 4)).backward()
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path / "run")
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_what_a_module_is_given_by_name_tells_nothing(tmp_path: Path) -> None:
    report = train(tmp_path, others, "mse", lambda model, inputs: model(input=inputs))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("do not tell whether the same batch was evaluated again" in reason for reason in report.reasons)


def test_nobody_looks_where_losses_have_labels(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for _ in range(2):
            F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,))).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not torch.nn.modules.module._has_any_global_hook()
    losses = events_of(tmp_path / "run", Loss)
    assert len(losses) == 2 and all(event.inputs_hash is None for event in losses)
    assert not torch.nn.modules.module._has_any_global_hook()


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_that_do_not_tell_make_no_warm_up_of_those_that_do(tmp_path: Path, compiled: bool) -> None:
    """Inputs are not seen where a step follows one that is not recorded."""
    model = Net()
    called = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run", steps={0, 1, 2} if compiled else {0, 1, 3}):
        for _ in range(4):
            for _ in range(2):
                optimizer.zero_grad()
                F.mse_loss(called(torch.randn(6, 8)), torch.randn(6, 4)).backward()
            optimizer.step()
    report = judged(tmp_path / "run")
    (finding,) = report.findings
    assert (finding.code, finding.steps) == ("GS401", [0, 1, 2] if compiled else [0, 1])
    assert compiled or any("emptied" in reason for reason in report.reasons), report.reasons
    assert not any("warm-up" in note or "on purpose" in note for note in report.coverage.notes)


def test_one_hook_stays_where_torch_compile_is_in_use(tmp_path: Path) -> None:
    """Compiled modules look at global hooks in each call, and are compiled again where their number is another one."""
    model = Net()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for _ in range(2):
            F.mse_loss(compiled(torch.randn(6, 8)), torch.randn(6, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == 1
    assert module_calls._listeners == []
