"""Parameters that Module.to swaps (those of a tensor subclass; all where torch is told so): nobody else may hold them
then, not weakly either, and hooks on them are dead from there on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import events_of, healthy, judged, record
from torch import nn

from gradcheck_dist.events import Backward
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_tensors_that_get_a_gradient_can_be_swapped(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    with attach(tmp_path):
        model._apply(lambda tensor: torch.zeros_like(tensor).requires_grad_())
    assert not model.weight.any()


def test_an_embedding_that_was_called_can_be_swapped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4))
    with attach(tmp_path):
        F.cross_entropy(model(torch.arange(5)), torch.randint(4, (5,))).backward()
        model.zero_grad()
        model.double()
    assert model[0].weight.dtype == torch.float64


def move(model: nn.Module) -> None:
    model.double()
    model.float()


def test_steps_behind_a_swap_are_judged(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        healthy(model, optimizer)
        move(model)

    record(step, tmp_path, steps=3)
    report = judged(tmp_path)
    assert (report.verdict, report.reasons) == ("clean", [])
    assert [event.step for event in events_of(tmp_path, Backward)] == [step for step in range(3) for _ in range(3)]


@pytest.mark.parametrize("asked", [None, range(2, 3)])
def test_steps_whose_gradients_nobody_saw_are_not_called_right(tmp_path: Path, asked: range | None) -> None:
    """A hook of the user's own: it is dead behind the swap, and ours, made anew, would wake it."""
    calls: list[int] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if not calls:
            for param in model.parameters():
                param.register_hook(lambda _: calls.append(1))
        healthy(model, optimizer)
        if len(calls) == 3 * len(list(model.parameters())):
            move(model)

    model = record(step, tmp_path, steps=3, asked=asked)
    assert len(calls) == 3 * len(list(model.parameters()))
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
    if asked is not None:  # no step was seen: training went on all the same
        assert report.reasons[0].startswith("step 2: losses went backward, and no gradient of a parameter was seen")
        assert "(--steps)" in report.next_step
        return
    assert report.reasons[0].startswith("steps 1 and 2: losses went backward, and no gradient of a parameter was seen")
    assert "(--steps)" in report.next_step
    assert diagnose(tmp_path).reasons == report.reasons
    assert diagnose(tmp_path, steps=range(1)).verdict == "clean"
