"""Clips that are given a gradient twice (GS602), none that is there yet, or what is used up (GS603)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run

WORDS, WIDTH = 24, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(tokens))))  # type: ignore[no-any-return]


def report_of(run: Path, clip: Callable[[Model], object], before: Callable[[Model], object] = Model.train) -> Report:
    torch.manual_seed(0)
    with gradcheck_dist.attach(run):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            before(model)
            tokens = torch.randint(WORDS, (4, 6))
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
            clip(model)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


def twice(max_norm: float, foreach: bool) -> Callable[[Model], object]:
    return lambda model: clip_grad_norm_([*model.parameters(), *model.head.parameters()], max_norm, foreach=foreach)


@pytest.mark.parametrize("foreach", [True, False])
def test_a_gradient_that_a_clip_is_given_twice(tmp_path: Path, foreach: bool) -> None:
    report = report_of(tmp_path / "run", twice(0.01, foreach))
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.num_parameters) == ("GS602", "error", 1)
    assert "head.weight more than once (2 times" in finding.explanation
    assert finding.first_event is not None
    assert finding.first_event.file == __file__


def test_it_is_a_warning_where_the_clip_cuts_nothing(tmp_path: Path) -> None:
    (finding,) = report_of(tmp_path / "run", twice(1e4, True)).findings
    assert (finding.code, finding.severity, finding.factor.observed) == ("GS602", "warning", None)


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: clip_grad_norm_(model.parameters(), 0.01),
        lambda model: [clip_grad_norm_(part.parameters(), 0.01) for part in model.children()],
        lambda model: clip_grad_norm_([*model.embed.parameters(), *model.head.parameters()], 0.01),
    ],
)
def test_gradients_that_a_clip_is_given_once_are_clean(tmp_path: Path, clip: Callable[[Model], object]) -> None:
    assert report_of(tmp_path / "run", clip).verdict == "clean"


@pytest.mark.parametrize("first", ["none", "zeros"])
def test_a_clip_in_front_of_the_first_backward_pass(tmp_path: Path, first: str) -> None:
    def clip(model: Model) -> None:
        model.zero_grad(set_to_none=first == "none")
        clip_grad_norm_(model.parameters(), 0.01)

    (finding,) = report_of(tmp_path / "run", lambda model: None, clip).findings
    assert (finding.code, finding.severity, finding.num_parameters) == ("GS603", "error", 4)
    assert "had no gradient" in finding.explanation


def test_a_clip_of_nothing_beside_one_that_clips_is_clean(tmp_path: Path) -> None:
    def clip(model: Model) -> Tensor:
        return clip_grad_norm_(model.parameters(), 0.01)

    assert report_of(tmp_path / "run", clip, clip).verdict == "clean"


def clip_now(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """By the name that stands there now, as under `gradcheck run`: what was imported before sees no generator."""
    return torch.nn.utils.clip_grad_norm_(params, max_norm)


def trained(model: Model) -> Iterator[Tensor]:
    return filter(lambda param: param.requires_grad, model.parameters())


def used_up(params: Iterator[Tensor]) -> Iterator[Tensor]:
    """As an optimizer or a norm leaves it."""
    list(params)
    return params


USED_UP: list[Callable[[Model], Iterator[Tensor]]] = [
    lambda model: used_up(model.parameters()),
    lambda model: used_up(trained(model)),
]


@pytest.mark.filterwarnings("ignore:`parameters` is an empty generator")
@pytest.mark.parametrize("params", USED_UP)
def test_a_clip_is_given_what_was_read_to_its_end(tmp_path: Path, params: Callable[[Model], Iterator[Tensor]]) -> None:
    (finding,) = report_of(tmp_path / "run", lambda model: clip_now(params(model), 0.01)).findings
    assert (finding.code, finding.severity, finding.num_parameters) == ("GS603", "error", 4)
    assert "read to its end before" in finding.explanation
    assert finding.factor.observed is not None and finding.factor.observed > 1


@pytest.mark.filterwarnings("ignore:`parameters` is an empty generator")
@pytest.mark.parametrize(
    "clip",
    [
        lambda model: clip_now(USED_UP[0](model), 1e4),
        lambda model: clip_now(trained(model), 0.01),
        lambda model: clip_now((param for param in ()), 0.01),
        lambda model: [clip_now(params, 0.01) for params in [model.parameters()] * 2],
    ],
    ids=["it would scale nothing", "read now", "nothing was in it", "it has scaled what it had"],
)
def test_other_iterators_are_clean(tmp_path: Path, clip: Callable[[Model], object]) -> None:
    assert report_of(tmp_path / "run", clip).verdict == "clean"
