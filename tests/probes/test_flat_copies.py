"""Buffers that gradients were flattened into are known by values, whole, in part, times a number, or not at all."""

from __future__ import annotations

import pytest
import torch
from elsewhere import pretend
from torch import Tensor, nn

from gradcheck_dist.probes.parameters.flat_copies import MAX_COMPARED, FlatCopies
from gradcheck_dist.probes.parameters.regions import Region
from gradcheck_dist.probes.parameters.registry import ParamInfo

SIZES = ((5, 4), (7,), (3, 3), (7,))


def infos() -> list[ParamInfo]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return [ParamInfo(index, f"w{index}", param, None, 96) for index, param in enumerate(params)]


def flat(held: list[ParamInfo]) -> Tensor:
    return torch.cat([info.param.grad.flatten() for info in held if info.param.grad is not None])


def regions_by_value(tensor: Tensor, known: list[ParamInfo]) -> list[Region]:
    return FlatCopies(lambda: known).regions(tensor)


@pytest.mark.parametrize("factor", [1.0, 1 / 3, -4096.0])
@pytest.mark.parametrize("part", [slice(None), slice(1, 3), slice(None, None, -1), slice(3, 4), slice(1, 2)])
def test_neighbours_are_known_in_either_order_and_times_a_number(part: slice, factor: float) -> None:
    known = infos()
    found = regions_by_value(flat(known[part]) * factor, known)
    assert [region.info.name for region in found] == [info.name for info in known[part]]
    assert [region.offset for region in found] == [sum(r.length for r in found[:i]) for i in range(len(found))]


def test_zeros_may_follow_the_last_gradient() -> None:
    known = infos()
    for order in (1, -1):
        padded = torch.cat([flat(known[::order]), torch.zeros(3)])
        assert [region.info.name for region in regions_by_value(padded, known)] == [one.name for one in known[::order]]
    assert regions_by_value(torch.cat([flat(known), torch.ones(3)]), known) == []
    assert regions_by_value(torch.cat([flat(known), torch.zeros(5000)]), known) == []


def test_what_is_no_copy_is_not_known() -> None:
    known = infos()
    whole = flat(known)
    assert regions_by_value(torch.zeros_like(whole), known) == []
    assert regions_by_value(whole + 0.01, known) == []
    assert regions_by_value(whole * torch.linspace(1, 1.01, len(whole)), known) == []
    assert regions_by_value(whole[:-1], known) == []


COARSE = (torch.bfloat16, torch.float16)


def mixed(dtype: torch.dtype, *indices: int) -> list[ParamInfo]:
    """Some gradients of a coarser type than their neighbours'."""
    known = infos()
    for index in indices or range(len(known)):
        param = known[index].param
        grad, param.data = param.grad, param.data.to(dtype)
        param.grad = grad.to(dtype) if grad is not None else None
    return known


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 3e-4])  # float16 has five bits of the last one's smaller elements
@pytest.mark.parametrize("dtype", COARSE)
def test_copies_of_another_type_are_known_as_nearly_as_the_coarser_one_tells(dtype: torch.dtype, factor: float) -> None:
    known = infos()
    names = [info.name for info in known]
    assert [region.info.name for region in regions_by_value((flat(known) * factor).to(dtype), known)] == names
    assert [region.info.name for region in regions_by_value((flat(known[1:3]) * factor).to(dtype), known)] == names[1:3]
    assert [region.info.name for region in regions_by_value(flat(known).double() * factor, known)] == names
    known = mixed(dtype)
    assert [region.info.name for region in regions_by_value(flat(known).float() * factor, known)] == names
    known = mixed(dtype, 1, 3)
    assert [region.info.name for region in regions_by_value(flat(known) * factor, known)] == names
    assert [region.info.name for region in regions_by_value(flat([known[1], known[3]]), known)] == ["w1", "w3"]


@pytest.mark.parametrize("dtype", COARSE)
def test_what_is_no_copy_is_not_known_in_another_type_either(dtype: torch.dtype) -> None:
    known = infos()
    whole = flat(known)
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        assert regions_by_value(torch.randn(len(whole), generator=generator).to(dtype), known) == []
        assert regions_by_value(torch.randn(7, generator=generator).to(dtype), known) == []
    assert regions_by_value((whole * torch.linspace(1, 1.2, len(whole))).to(dtype), known) == []
    assert regions_by_value(torch.zeros_like(whole).to(dtype), known) == []
    assert regions_by_value((whole * 1e-7).half(), known) == []  # a few spacings of zero are anybody's
    assert regions_by_value(whole.mul(100).to(torch.int32), known) == []


@pytest.mark.parametrize("dtype", COARSE)
def test_few_elements_of_another_type_are_known_behind_their_neighbour_s(dtype: torch.dtype) -> None:
    """A token count is a multiple of any gradient of one element."""
    known = many()
    copies = FlatCopies(lambda: known)
    assert copies.regions(torch.ones(1, dtype=dtype)) == []
    for info in known[1:4]:
        assert info.param.grad is not None
        assert [region.info for region in copies.regions(info.param.grad.to(dtype))] == [info]
    assert copies.regions(torch.ones(1, dtype=dtype)) == []


def test_a_small_counter_that_is_reduced_before_any_gradient_is_there_is_no_copy() -> None:
    assert regions_by_value(torch.zeros(2), []) == []
    known = infos()
    for info in known:
        info.param.grad = None
    assert regions_by_value(torch.zeros(2), known) == []


def test_an_embedding_that_few_tokens_reached_is_known() -> None:
    known = infos()
    table = nn.Parameter(torch.randn(200, 8))
    table.grad = torch.zeros(200, 8)
    table.grad[[3, 77]] = torch.randn(2, 8)
    known.append(ParamInfo(len(known), "table", table, None, 96))
    assert [region.info.name for region in regions_by_value(table.grad * 0.5, known)] == ["table"]
    other = table.grad.clone()
    other[77] += 1
    assert regions_by_value(other, known) == []


def alike(count: int) -> list[ParamInfo]:
    params = [nn.Parameter(torch.zeros(8)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(8)
    return [ParamInfo(index, f"w{index}", param, None, 96) for index, param in enumerate(params)]


@pytest.mark.parametrize("order", [1, -1])
def test_copies_that_come_one_by_one_are_found_where_the_last_one_ended(order: int) -> None:
    """More parameters of one size than would be compared with each."""
    known = alike(200)
    asked: list[None] = []
    copies = FlatCopies(lambda: asked.append(None) or known)  # type: ignore[func-returns-value]
    for info in known[::order]:
        assert info.param.grad is not None
        assert [region.info for region in copies.regions(info.param.grad / 2)] == [info]
    assert len(asked) == 1
    copies.step_begins()
    first = known[0].param.grad
    assert first is not None and [region.info.name for region in copies.regions(first * 3)] == ["w0"]


def test_what_is_no_copy_is_compared_with_so_many_gradients_a_step() -> None:
    known = alike(200)
    asked: list[None] = []
    copies = FlatCopies(lambda: asked.append(None) or known)  # type: ignore[func-returns-value]
    for _ in range(MAX_COMPARED):
        assert copies.regions(torch.randn(8)) == []
    assert 0 < len(asked) < MAX_COMPARED // 32
    first = known[5].param.grad
    assert first is not None and copies.regions(first * 3) == []
    copies.step_begins()
    assert [region.info.name for region in copies.regions(first * 3)] == ["w5"]


def many() -> list[ParamInfo]:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.zeros(size)) for size in ((6, 4), (6,), (1,), (6,), (4, 6), (6,), (4,), (6, 4), (6,))]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return [ParamInfo(index, f"w{index}", param, None, 96) for index, param in enumerate(params)]


@pytest.mark.parametrize("chosen", [(1, 3, 5, 8), (8, 3, 1), (0, 2, 5), (2, 4), (1, 5)])
def test_gradients_that_a_trainer_picks_out_are_known_where_they_are_no_neighbours(chosen: tuple[int, ...]) -> None:
    """Megatron sums those of norms and of some biases over the ranks of sequence parallelism, and of no others."""
    known = many()
    copies = FlatCopies(lambda: known)
    for _ in range(2):
        found = copies.regions(flat([known[index] for index in chosen]) / 3)
        assert [region.info.id for region in found] == list(chosen)
        assert [region.offset for region in found] == [sum(r.length for r in found[:i]) for i in range(len(found))]
    assert copies.regions(flat([known[index] for index in chosen]) + 1) == []
    assert copies.regions(flat([known[index] for index in chosen]).reshape(1, -1) + 1) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_known_in_an_order_of_the_trainer_s_own(dtype: torch.dtype) -> None:
    """Sorted by size, by shape or by name, in one buffer or in several."""
    known = many()
    for order in ([4, 0, 7, 1, 8, 3, 5, 6, 2], [2, 6, 1, 3, 5, 8, 0, 4, 7], [3, 1, 4], [6, 0, 5]):
        copies, mine = FlatCopies(lambda: known), [known[index] for index in order]
        for buffer in (flat(mine), torch.cat([flat(mine), torch.zeros(3)])):
            found = copies.regions((buffer / 3).to(dtype))
            assert [region.info.id for region in found] == order
            assert [region.offset for region in found] == [sum(r.length for r in found[:i]) for i in range(len(found))]
        assert copies.regions(torch.cat([flat(mine), torch.ones(3)]).to(dtype)) == []
        assert copies.regions((flat(mine) * torch.linspace(1, 1.5, len(flat(mine)))).to(dtype)) == []


def test_an_optimizer_s_stack_of_gradients_may_end_with_zeros() -> None:
    known = alike(6)
    mine = [info.param.grad for info in (known[1], known[4]) if info.param.grad is not None]
    stack = torch.cat([torch.stack(mine), torch.zeros_like(mine[0])[None]])
    copies = FlatCopies(lambda: known)
    assert copies.regions(stack) == []  # an activation, for all that is known
    found = copies.regions(stack, stacked=True)
    assert [(region.info.name, region.offset) for region in found] == [("w1", 0), ("w4", mine[0].numel())]
    assert copies.regions(stack + 1, stacked=True) == []


def test_a_gradient_of_zeros_among_them_is_known_by_its_neighbours() -> None:
    known = many()
    assert known[3].param.grad is not None
    known[3].param.grad.zero_()
    assert [region.info.id for region in regions_by_value(flat([known[i] for i in (1, 3, 8)]), known)] == [1, 3, 8]
    buffer = flat([known[i] for i in (1, 5, 8)])
    buffer[6:12] = 0
    assert 5 not in [region.info.id for region in regions_by_value(buffer, known)]


def test_gradients_are_known_where_they_are_gathered_in_a_buffer_of_ones_own() -> None:
    known = many()
    whole = flat([known[1], known[4]])
    for info in known:
        info.param.main_grad, info.param.grad = info.param.grad, None  # type: ignore[attr-defined]
    assert [region.info.id for region in regions_by_value(whole, known)] == [1, 4]


def test_on_an_accelerator_buffers_hold_what_they_held_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    known = infos()
    copies = FlatCopies(lambda: known)
    for _ in range(2):  # two passes of one step
        assert [region.info.name for region in copies.regions(flat(known[:2]) / 2)] == ["w0", "w1"]
        assert copies.regions(torch.randn(27)) == []
        assert [region.info.name for region in copies.regions(flat(known[3:1:-1]))] == ["w3", "w2"]
    copies.step_begins()
    monkeypatch.setattr(FlatCopies, "_search", None)  # nobody waits for it again
    for info in known:
        assert info.param.grad is not None
        info.param.grad += 1
    assert [region.info.name for region in copies.regions(flat(known[:2]))] == ["w0", "w1"]
    assert copies.regions(torch.randn(27)) == []
    known[2].param.grad = None
    assert copies.regions(flat(known[2:])) == [] == copies.regions(torch.randn(5))


def test_on_an_accelerator_results_are_known_by_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    known = infos()
    copies = FlatCopies(lambda: known)
    buffer = flat(known)
    found = copies.regions(buffer)
    buffer *= torch.linspace(0, 1, len(buffer))  # what ranks gave
    copies.came_out(found, len(buffer), buffer, found)
    assert copies.reduced(buffer.view(-1)) == known
    assert [region.info for region in copies.regions(buffer)] == known
    assert copies.reduced(buffer[1:]) == copies.reduced(buffer.clone()) == []
    copies.step_begins()
    assert copies.reduced(buffer) == []
