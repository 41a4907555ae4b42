"""Where gradients lie is told by address, without all parameters being asked for every tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradcheck_dist.events import AnyRecord
from gradcheck_dist.probes.parameters.places import MOST_FRUITLESS, Places
from gradcheck_dist.probes.parameters.regions import in_memory
from gradcheck_dist.probes.parameters.registry import Registry

NUM_LAYERS = 20


@pytest.fixture
def model() -> nn.Module:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(NUM_LAYERS)))
    for index, param in enumerate(net.parameters()):
        param.grad = torch.full_like(param, float(index))
    return net


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that all parameters were asked."""
    calls: list[None] = []
    original = Places._ask

    def ask(self: Places) -> None:
        calls.append(None)
        original(self)

    monkeypatch.setattr(Places, "_ask", ask)
    return calls


def places_of(model: nn.Module) -> tuple[Places, Registry]:
    records: list[AnyRecord] = []
    registry = Registry(records.append, 16)
    registry.adopt(model.parameters())
    for name, param in model.named_parameters():
        info = registry.find(param) or registry.add_unnamed(param)
        info.name = name
    return Places(registry), registry


def names(places: Places, tensor: torch.Tensor) -> list[str]:
    return [regions[0].info.name for regions, _ in places.overlapping(tensor)]


def test_each_gradient_is_found_and_parameters_are_asked_once(model: nn.Module, asked: list[None]) -> None:
    places, _ = places_of(model)
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert names(places, param.grad) == [name]
        assert names(places, param.grad.view(-1)) == [name]
    assert len(asked) == 1


def moved(model: nn.Module) -> None:
    """The old places hold another parameter's."""
    grads = [param.grad for param in model.parameters()]
    for param, grad in zip(model.parameters(), [*grads[2:], *grads[:2]], strict=True):
        param.grad = grad


def emptied(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None
    next(model.parameters()).grad = torch.ones(4, 4)


def flattened(model: nn.Module) -> None:
    flat, offset = torch.zeros(NUM_LAYERS * 20), 0
    for param in model.parameters():
        param.grad = flat[offset : offset + param.numel()].view_as(param)
        offset += param.numel()


@pytest.mark.parametrize("change", [moved, emptied, flattened])
def test_gradients_that_moved_are_found_where_they_are(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    places, _ = places_of(model)
    old = [param.grad for param in model.parameters()]
    for grad in old:
        assert grad is not None
        places.overlapping(grad)
    change(model)
    owner = {id(param.grad): name for name, param in model.named_parameters() if param.grad is not None}
    for param in model.parameters():
        if param.grad is not None:
            assert names(places, param.grad) == [owner[id(param.grad)]]
    for grad in old:
        assert grad is not None
        assert names(places, grad) == [owner[id(grad)]] if id(grad) in owner else not names(places, grad)


def test_a_flat_buffer_holds_all_and_a_part_of_it_those_that_it_cuts(model: nn.Module, asked: list[None]) -> None:
    flattened(model)
    places, _ = places_of(model)
    every = [name for name, _ in model.named_parameters()]
    first = model[0].weight.grad
    assert first is not None
    flat = first.as_strided((NUM_LAYERS * 20,), (1,))
    assert names(places, flat) == every
    assert names(places, flat[8:18]) == ["0.weight", "0.bias"]
    assert len(asked) == 1
    padded = torch.zeros(NUM_LAYERS * 20 + 3)
    for param in model.parameters():
        assert param.grad is not None
        offset = param.grad.storage_offset()
        param.grad = padded[offset : offset + param.numel()].view_as(param)
    assert names(places, padded) == every


def test_a_gradient_in_channels_last_is_found() -> None:
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    net(torch.ones(1, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
    places, _ = places_of(net)
    assert net.weight.grad is not None and not net.weight.grad.is_contiguous()
    assert names(places, net.weight.grad) == ["weight"]
    assert names(places, torch.ones(4, 3, 3, 3).to(memory_format=torch.channels_last)) == []


def test_what_is_no_gradient_or_cannot_be_compared_is_nobodys(model: nn.Module) -> None:
    places, _ = places_of(model)
    weight = model[0].weight.grad
    assert weight is not None
    assert names(places, torch.zeros(100)) == []
    assert names(places, torch.zeros(0)) == []
    turned = weight.t()
    assert in_memory(turned, places.overlapping(turned)) == []  # the same memory in another order
    model[0].weight.grad = torch.zeros(4, 4).to_sparse()
    assert names(places, weight) == []


def test_a_parameter_that_comes_later_is_found(model: nn.Module) -> None:
    places, registry = places_of(model)
    grad = model[0].weight.grad
    assert grad is not None
    places.overlapping(grad)
    late = nn.Parameter(torch.zeros(3))
    late.grad = torch.ones(3)
    assert places.overlapping(late.grad) == []
    registry.add_unnamed(late).name = "late"
    assert names(places, late.grad) == ["late"]


def test_a_buffer_in_place_of_grad_is_found(model: nn.Module) -> None:
    places, _ = places_of(model)
    for param in model.parameters():
        param.grad = None
        param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
    for name, param in model.named_parameters():
        assert names(places, param.main_grad) == [name]


def test_gradients_that_are_replaced_one_by_one_are_found_beside_the_last(model: nn.Module, asked: list[None]) -> None:
    places, _ = places_of(model)
    for order in (1, -1):
        for name, param in list(model.named_parameters())[::order]:
            assert param.grad is not None
            kept, param.grad = param.grad, param.grad / 2  # the old memory is not given away
            assert names(places, param.grad) == [name]
            owner = places.whose(param.grad)
            assert owner is not None and owner.name == name
            assert places.whose(kept) is None
    assert len(asked) <= 1 + MOST_FRUITLESS


def test_what_is_nobodys_asks_all_so_often_a_step_and_then_once_a_pass(model: nn.Module, asked: list[None]) -> None:
    places, registry = places_of(model)
    activations = [torch.zeros(5) for _ in range(3 * MOST_FRUITLESS)]
    assert not any(names(places, one) for one in activations) and len(asked) == MOST_FRUITLESS
    assert places.whose(activations[0]) is None and len(asked) == MOST_FRUITLESS
    first, *_, last = model.parameters()
    last.grad = torch.ones_like(last)
    assert names(places, last.grad) == []
    found = registry.find(last)
    assert found is not None and [r[0].info for r, _ in places.overlapping(last.grad, [found])] == [found]
    first.grad = torch.ones_like(first)
    assert names(places, first.grad) == []
    places.pass_changes()
    assert names(places, first.grad) == ["0.weight"]
    assert not names(places, activations[0])
    places.step_begins()
    first.grad = torch.zeros_like(first)
    assert names(places, first.grad) == ["0.weight"]


def test_whose_gradient_a_tensor_is(model: nn.Module) -> None:
    places, _ = places_of(model)
    weight = model[0].weight.grad
    assert weight is not None
    found = [places.whose(one) for one in (weight, weight.data, weight.view(-1), weight.t())]
    assert [info.name if info else None for info in found] == ["0.weight"] * 4
    assert places.whose(weight[1:]) is None and places.whose(weight[:2]) is None
    assert places.whose(torch.zeros(4, 4)) is None and places.whose(weight.to_sparse()) is None
