"""Modules that share one parameter until torch gives each its own (GS706); what a program does itself is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run

VOCABULARY, WIDTH = 24, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def assigned() -> Model:
    model = Model()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def from_meta() -> Model:
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    return model


def converted() -> Model:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return Model().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def tied_again() -> Model:
    model = from_meta()
    model.head.weight = model.embed.weight
    return model


def in_one_memory() -> Model:
    model = Model()
    model.load_state_dict(model.state_dict(), assign=True)
    return model


def own_head() -> Model:
    model = Model()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    return model


def own_head_of_a_copy() -> Model:
    model = own_head()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def frozen_embedding() -> Model:
    model = assigned()
    model.embed.weight.requires_grad_(False)
    return model


def swapped() -> Model:
    """torch refuses to swap what is referred to weakly."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return Model().double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def report_of(run: Path, make: Callable[[], Model], add_up: bool = False) -> Report:
    torch.manual_seed(0)
    with gradcheck_dist.attach(run):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                tokens = torch.randint(VOCABULARY, (4, 6))
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).div(2).backward()
            if add_up:
                model.embed.weight.grad += model.head.weight.grad
                model.head.weight.grad.copy_(model.embed.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


@pytest.mark.parametrize("make", [assigned, from_meta, converted, in_one_memory])
def test_what_torch_unties_is_found_where_it_did(tmp_path: Path, make: Callable[[], Model]) -> None:
    report = report_of(tmp_path / "run", make)
    (finding,) = report.findings
    assert (finding.code, finding.num_parameters) == ("GS706", 2)
    assert "head.weight = embed.weight" in finding.fix
    assert ("share" in finding.explanation) is (make is in_one_memory)
    assert finding.first_event is not None
    first = make.__code__.co_firstlineno
    assert finding.first_event.file == __file__
    assert first < finding.first_event.line < first + 9


@pytest.mark.parametrize("make", [Model, tied_again, own_head, own_head_of_a_copy, frozen_embedding, swapped])
def test_what_is_tied_or_was_untied_by_the_program_is_clean(tmp_path: Path, make: Callable[[], Model]) -> None:
    assert report_of(tmp_path / "run", make).verdict == "clean"


def test_copies_whose_gradients_a_line_adds_up_are_not_accused(tmp_path: Path) -> None:
    assert not report_of(tmp_path / "run", assigned, add_up=True).findings
