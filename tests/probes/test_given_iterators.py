"""What autograd is given may be an iterator (`model.parameters()`), which can be looked at once only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradcheck_dist
from gradcheck_dist.probes.session import attach

Train = Callable[[nn.Module, Tensor, Tensor], None]


def _put(model: nn.Module, gradients: tuple[Tensor, ...]) -> None:
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        param.grad = gradient


def _to_parameters(model: nn.Module, one: Tensor, two: Tensor) -> None:
    _put(model, torch.autograd.grad(one + two, model.parameters()))


def _from_losses(model: nn.Module, one: Tensor, two: Tensor) -> None:
    _put(model, torch.autograd.grad(map(torch.clone, (one, two)), [*model.parameters()], iter(_ones(2))))


def _by_name(model: nn.Module, one: Tensor, two: Tensor) -> None:
    given = torch.autograd.grad(
        outputs=(loss for loss in (one, two)), inputs=model.parameters(), grad_outputs=iter(_ones(2))
    )
    _put(model, given)


def _penalty(model: nn.Module, one: Tensor, two: Tensor) -> None:
    norms = torch.autograd.grad(one, model.parameters(), create_graph=True)
    (one + two + torch.stack([norm.square().sum() for norm in norms]).sum()).backward()


def _backward(model: nn.Module, one: Tensor, two: Tensor) -> None:
    torch.autograd.backward(loss for loss in (one, two))


def _backward_with_gradients(model: nn.Module, one: Tensor, two: Tensor) -> None:
    torch.autograd.backward(iter((one, two)), iter(_ones(2)))


def _backward_to_some(model: nn.Module, one: Tensor, two: Tensor) -> None:
    (one + two).backward(inputs=model.parameters())  # type: ignore[arg-type]  # torch makes a tuple of it


def _ones(num: int) -> Iterator[Tensor]:
    return (torch.tensor(1.0) for _ in range(num))


WAYS: dict[str, Train] = {
    "to parameters": _to_parameters,
    "from losses": _from_losses,
    "by name": _by_name,
    "penalty": _penalty,
    "backward": _backward,
    "backward with gradients": _backward_with_gradients,
    "backward to some": _backward_to_some,
}


def _trained(way: Train) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        inputs, labels = torch.randn(8, 6), torch.randint(0, 5, (8,))
        loss = nn.functional.cross_entropy(model(inputs), labels) / 2
        way(model, loss, nn.functional.cross_entropy(model(-inputs), labels) / 2)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("name", WAYS)
def test_training_gets_what_an_iterator_gives(name: str, tmp_path: Path) -> None:
    plain = _trained(WAYS[name])
    with attach(tmp_path / "run"):
        recorded = _trained(WAYS[name])
    assert all(map(torch.equal, plain, recorded))
    assert gradcheck_dist.diagnose(tmp_path / "run").verdict != "findings"
