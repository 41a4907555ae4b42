"""Gradients of parameters of one shape that change places (GS404), and copies that are meant."""

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

WORDS, WIDTH, LAYERS = 24, 8, 11


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def by_name(model: Model) -> list[nn.Parameter]:
    """The layers' weights in the order of their names, "layers.10" before "layers.2"."""
    named = {name: param for name, param in model.named_parameters() if name.endswith("weight") and "layers" in name}
    return [named[name] for name in sorted(named)]


def by_number(model: Model) -> list[nn.Parameter]:
    return [layer.weight for layer in model.layers]  # type: ignore[misc]


def trained(run: Path, loss_into_grads: Callable[[Model, Tensor], None], behind: Callable[[Model], None]) -> Report:
    torch.manual_seed(0)
    with gradcheck_dist.attach(run):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                tokens = torch.randint(WORDS, (4, 6))
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()) / 2
                loss_into_grads(model, loss)
            behind(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e4)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


def backward(_: Model, loss: Tensor) -> None:
    loss.backward()


def grad_in_order(of: Callable[[Model], list[nn.Parameter]]) -> Callable[[Model, Tensor], None]:
    """Gradients computed in one order, and put where another one says."""

    def into_grads(model: Model, loss: Tensor) -> None:
        mine, theirs = by_number(model), of(model)
        rest = [param for param in model.parameters() if all(param is not one for one in mine)]
        grads = torch.autograd.grad(loss, [*theirs, *rest])
        for param, grad in zip([*mine, *rest], grads, strict=True):
            param.grad = grad if param.grad is None else param.grad + grad

    return into_grads


def nothing(_: Model) -> None:
    return


def exchange(model: Model) -> None:
    first, second = by_number(model)[:2]
    first.grad, second.grad = second.grad, first.grad


def put_back(model: Model) -> None:
    exchange(model)
    exchange(model)


@pytest.mark.parametrize(
    ("into_grads", "behind", "num"), [(backward, exchange, 2), (grad_in_order(by_name), nothing, LAYERS - 2)]
)
def test_gradients_that_changed_places_are_named(
    tmp_path: Path, into_grads: Callable[[Model, Tensor], None], behind: Callable[[Model], None], num: int
) -> None:
    report = trained(tmp_path / "run", into_grads, behind)
    (finding,) = report.findings
    assert (finding.code, finding.num_parameters) == ("GS404", num)
    named = "layers.0.weight has that of layers.1" if behind is exchange else "layers.10.weight has that of layers.9"
    assert named in finding.explanation


@pytest.mark.parametrize(("into_grads", "behind"), [(backward, put_back), (grad_in_order(by_number), nothing)])
def test_gradients_in_their_places_are_clean(
    tmp_path: Path, into_grads: Callable[[Model, Tensor], None], behind: Callable[[Model], None]
) -> None:
    assert trained(tmp_path / "run", into_grads, behind).verdict == "clean"


def test_gradients_that_are_copied_to_another_model_are_not_accused(tmp_path: Path) -> None:
    """First-order meta-learning: what the inner model got is the outer one's."""
    torch.manual_seed(0)
    with gradcheck_dist.attach(tmp_path / "run"):
        outer, inner = Model(), Model()
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        for _ in range(2):
            inner.load_state_dict(outer.state_dict())
            tokens = torch.randint(WORDS, (4, 6))
            F.cross_entropy(inner(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
            for mine, theirs in zip(outer.parameters(), inner.parameters(), strict=True):
                mine.grad, theirs.grad = theirs.grad, None
            optimizer.step()
            optimizer.zero_grad()
    assert not diagnose(read_run(tmp_path / "run")).findings
