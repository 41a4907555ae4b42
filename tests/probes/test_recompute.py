"""Checkpointed regions that draw other random numbers when they are run again: found, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run

Region = Callable[[nn.Module, Tensor], Tensor]


def region(**options: Any) -> Region:
    return lambda block, x: checkpoint.checkpoint(block, x, **options)


def weights_after(run: Path | None, region: Region, drop: float = 0.5) -> tuple[Report | None, list[Tensor]]:
    """One step of a model with a checkpointed block; its report, if it was recorded."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(drop), nn.ReLU(), nn.Linear(8, 4))
    model = nn.ModuleDict({"block": block, "head": nn.Linear(4, 5)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(2):
            hidden = region(block, torch.randn(16, 4, requires_grad=True))
            nn.functional.cross_entropy(model["head"](hidden), torch.randint(5, (16,))).div(2).backward()
        optimizer.step()

    if run is None:
        step()
        return None, [param.detach().clone() for param in model.parameters()]
    with gradcheck_dist.attach(run):
        step()
    return diagnose(read_run(run)), [param.detach().clone() for param in model.parameters()]


OFF = {
    "not reentrant": region(use_reentrant=False, preserve_rng_state=False),
    "reentrant": region(use_reentrant=True, preserve_rng_state=False),
}
ON = {
    "not reentrant": region(use_reentrant=False),
    "reentrant": region(use_reentrant=True),
    "recomputed to the end": region(use_reentrant=False, early_stop=False),
    "not checkpointed": lambda block, x: block(x),
}


@pytest.mark.parametrize("name", OFF)
def test_other_random_numbers_in_backward_are_found(tmp_path: Path, name: str) -> None:
    report, watched = weights_after(tmp_path / "run", OFF[name])
    assert report is not None
    assert [finding.code for finding in report.findings] == ["GS704"]
    finding = report.findings[0]
    assert (finding.num_parameters, finding.pattern) == (
        4,
        "2 checkpointed regions recomputed with other random numbers",
    )
    assert finding.first_event is not None
    assert finding.first_event.file == __file__
    assert all(map(torch.equal, watched, weights_after(None, OFF[name])[1]))


@pytest.mark.parametrize("name", ON)
def test_kept_random_numbers_are_not_accused_and_training_is_untouched(tmp_path: Path, name: str) -> None:
    report, watched = weights_after(tmp_path / "run", ON[name])
    assert report is not None
    assert (report.verdict, report.findings) == ("clean", [])
    assert all(map(torch.equal, watched, weights_after(None, ON[name])[1]))


class ByHand(torch.autograd.Function):
    """A checkpoint that asks for its region's gradients in backward; `brings`: its own results take them further, else
    it adds them itself."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, brings: bool, x: Tensor, *params: Tensor) -> Tensor:
        ctx.block, ctx.brings, ctx.params, ctx.state = block, brings, params, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        state = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.block(x)
        torch.set_rng_state(state)
        of_x, *found = torch.autograd.grad(y, (x, *ctx.params), grad)
        if ctx.brings:
            return None, None, of_x, *found
        for param, own in zip(ctx.params, found, strict=True):
            param.grad = own if param.grad is None else param.grad + own
        return None, None, of_x, *[None] * len(found)


@pytest.mark.parametrize("brings", [True, False])
def test_gradients_that_a_backward_function_asks_for_count_once(tmp_path: Path, brings: bool) -> None:
    def region(block: nn.Module, x: Tensor) -> Tensor:
        return ByHand.apply(block, brings, x, *block.parameters())

    report, watched = weights_after(tmp_path / "run", region)
    assert report is not None
    assert (report.verdict, report.findings) == ("clean", [])
    assert all(map(torch.equal, watched, weights_after(None, region)[1]))


class RunAgain(torch.autograd.Function):
    """A checkpoint whose backward runs a pass of its own, as often as it is told."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, times: int, x: Tensor) -> Tensor:
        ctx.block, ctx.times = block, times
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        for _ in range(ctx.times):
            x.grad = None
            with torch.enable_grad():
                y = ctx.block(x)
            torch.autograd.backward(y, grad)
        return None, None, x.grad


@pytest.mark.parametrize("times", [1, 2])
def test_a_backward_function_that_runs_its_own_pass_twice_leaves_the_verdict_open(tmp_path: Path, times: int) -> None:
    report, _ = weights_after(
        tmp_path / "run", lambda block, x: RunAgain.apply(block, times, x.requires_grad_()), drop=0.0
    )
    assert report is not None and report.findings == []
    assert report.verdict == ("clean" if times == 1 else "undetermined")
    assert any("one gradient two times" in reason for reason in report.reasons) == (times == 2)


@pytest.mark.parametrize("name", OFF)
def test_a_region_that_draws_nothing_needs_no_state(tmp_path: Path, name: str) -> None:
    report, _ = weights_after(tmp_path / "run", OFF[name], drop=0.0)
    assert report is not None
    assert report.findings == []


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """Of labels that count alone."""
    valid = labels >= 0
    return -logits.log_softmax(-1)[valid].gather(1, labels[valid, None]).sum()


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    return (-logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)).sum()


@pytest.mark.parametrize("of_labels", [picked, masked, nn.functional.cross_entropy])
def test_a_loss_in_a_checkpoint_is_computed_no_third_time(
    tmp_path: Path, of_labels: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """What it draws from a generator of its own, or counts, would be another."""
    model, labels = nn.Linear(4, 3), torch.tensor([0, 2, -100, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []

    def loss(x: Tensor) -> Tensor:
        calls.append(1)
        return of_labels(model(x), labels)

    with gradcheck_dist.attach(tmp_path):
        (checkpoint.checkpoint(loss, torch.randn(4, 4), use_reentrant=False) / 3).backward()
        optimizer.step()
    assert len(calls) == 2
    assert not diagnose(read_run(tmp_path)).findings


@pytest.mark.parametrize("once", [False, True])
def test_what_hooks_keep_for_a_loss_is_not_asked_for(tmp_path: Path, once: bool) -> None:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        kept[len(kept) + 1000] = tensor
        return len(kept) + 999

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[int] = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return nn.functional.mse_loss(model(x), y)

    with gradcheck_dist.attach(tmp_path):
        batch = torch.randn(8, 4), torch.randn(8, 2)
        if once:  # an offloader that lets go of what it gave out
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda key: kept.pop(key)):
                loss(*batch).backward()
        else:
            checkpoint.checkpoint(loss, *batch, use_reentrant=False).backward()
        optimizer.step()
    assert len(calls) == (1 if once else 2)
    assert not diagnose(read_run(tmp_path)).findings


def test_an_error_in_the_region_comes_through_and_torch_is_put_back(tmp_path: Path) -> None:
    before = checkpoint._checkpoint_without_reentrant_generator

    def fails(x: Tensor) -> Tensor:
        raise ValueError("inside")

    with gradcheck_dist.attach(tmp_path / "run"):
        for reentrant in (False, True):
            with pytest.raises(ValueError, match="inside"):
                checkpoint.checkpoint(fails, torch.randn(2, requires_grad=True), use_reentrant=reentrant)
    assert checkpoint._checkpoint_without_reentrant_generator is before
    assert "apply" not in vars(checkpoint.CheckpointFunction)


@pytest.mark.parametrize(
    ("reentrant", "given", "unreached"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_a_checkpoint_that_no_trained_input_enters_cuts_its_parameters_off(
    tmp_path: Path, reentrant: bool, given: bool, unreached: bool
) -> None:
    torch.manual_seed(0)
    block, head = nn.Linear(4, 4), nn.Linear(4, 5)
    optimizer = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.1)
    with gradcheck_dist.attach(tmp_path / "run"):
        embedded = torch.randn(16, 4, requires_grad=given)
        hidden = checkpoint.checkpoint(block, embedded, use_reentrant=reentrant)
        nn.functional.cross_entropy(head(hidden), torch.randint(5, (16,))).backward()
        optimizer.step()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, [one.code for one in report.findings]) == ("clean", ["GS702"] if unreached else [])
