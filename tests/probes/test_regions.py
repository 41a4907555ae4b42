"""Optimizers that own no parameter of the model: float32 copies, flat buffers, shards; and what is no copy at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch, token_sum
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import ProbeError, Reduce
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.parameters.regions import Finder, Region, in_memory
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run


def model_of() -> nn.Module:
    """With norms, whose weights are all ones and whose biases are all zeros."""
    net = Net()
    net.inner = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16))
    return net


def each(values: list[Tensor]) -> list[Tensor]:
    return [value.float().clone() for value in values]


def flat(values: list[Tensor]) -> list[Tensor]:
    return [torch.cat([value.float().flatten() for value in values])]


def backwards(values: list[Tensor]) -> list[Tensor]:
    return flat(values[::-1])


def padded_thirds(values: list[Tensor]) -> list[Tensor]:
    whole = flat(values)[0]
    return [part.clone() for part in torch.cat([whole, torch.zeros(-len(whole) % 3)]).chunk(3)]


def train(copies_of: Callable[[list[Tensor]], list[Tensor]], run_dir: Path, factor: float = 1.0) -> Report:
    """Two steps of two batches; the optimizer reads gradients that lie as `copies_of` lays the parameters."""
    model = model_of().bfloat16()
    params = list(model.parameters())
    copies = copies_of([param.detach() for param in params])
    optimizer = torch.optim.SGD(copies, lr=0.0)
    with attach(run_dir, objective="global-token-mean"):
        for _ in range(2):
            data = [batch(0, k) for k in range(2)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                (token_sum(model, part) / total).backward()
            grads = copies_of([param.grad * factor for param in params if param.grad is not None])
            for copy, grad in zip(copies, grads, strict=True):
                copy.grad = grad
            optimizer.step()
            model.zero_grad()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("copies_of", [each, flat, backwards, padded_thirds])
def test_what_an_optimizer_reads_through_copies_is_found_and_judged(
    copies_of: Callable[[list[Tensor]], list[Tensor]], tmp_path: Path
) -> None:
    report = train(copies_of, tmp_path / "right")
    assert (report.verdict, report.findings) == ("clean", [])
    assert report.coverage.parameters_observed == report.coverage.parameters_total == 9
    report = train(copies_of, tmp_path / "wrong", factor=0.5)
    assert [round(finding.factor.observed, 2) for finding in report.findings] == [0.5]


def test_tensors_that_are_no_copies_are_not_taken_for_the_model_and_nobody_is_accused(tmp_path: Path) -> None:
    def unrelated(values: list[Tensor]) -> list[Tensor]:
        return [value.float() * 1.5 + 1 for value in values]

    report = train(unrelated, tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("what it reads is not known" in reason for reason in report.reasons)


def test_a_step_before_any_training_is_none(tmp_path: Path) -> None:
    """DeepSpeed steps once over empty gradients, so that the optimizer has its state."""
    model = Net()
    params = list(model.parameters())
    copies = each([param.detach() for param in params])
    optimizer = torch.optim.SGD(copies, lr=0.1)
    with attach(tmp_path, objective="global-token-mean", steps=range(1)):
        optimizer.step()
        (token_sum(model, batch(0, 0)) / int((batch(0, 0)[1] >= 0).sum())).backward()
        for copy, param in zip(copies, params, strict=True):
            copy.grad = param.grad
        optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.coverage.parameters_observed, report.run.steps) == ("clean", 5, [0])


def test_a_parameter_that_belongs_to_no_module_is_watched_from_the_second_step_on(tmp_path: Path) -> None:
    model, bias = Net(), nn.Parameter(torch.zeros(20))
    optimizer = torch.optim.SGD([*model.parameters(), bias], lr=0.1)
    tokens, labels = batch(0, 0)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(2):
            F.cross_entropy((model(tokens) + bias).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.coverage.parameters_observed) == ("clean", 6)


def test_parameters_of_no_module_are_judged_from_their_second_step_on(tmp_path: Path) -> None:
    layer, weight = nn.Linear(6, 4), torch.randn(4, 5, requires_grad=True)
    optimizer = torch.optim.SGD([*layer.parameters(), weight], lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(3):
            labels = torch.randint(5, (7,))
            logits = layer(torch.randn(7, 6)).tanh() @ weight
            (F.cross_entropy(logits, labels, reduction="sum") / len(labels)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose_run(tmp_path)
    assert (report.verdict, report.coverage.parameters_observed) == ("clean", 3), report.reasons
    first = diagnose_run(tmp_path, steps=[0])
    assert (first.verdict, first.findings) == ("undetermined", [])


def test_a_parameter_that_no_forward_has_shown_is_no_copy_of_one_that_looks_alike(tmp_path: Path) -> None:
    model, other = Net(), nn.Linear(16, 20)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    nn.init.zeros_(model.head.bias)
    nn.init.zeros_(other.bias)
    other.bias.grad = torch.full_like(other.bias, 7.0)
    with attach(tmp_path, objective="global-token-mean"):
        total = int((batch(0, 0)[1] >= 0).sum())
        (token_sum(model, batch(0, 0)) / total).backward()
        optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("a gradient of unnamed." in reason for reason in report.reasons)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def in_buffer(model: nn.Module) -> Tensor:
    """Gradients in a flat buffer, as `main_grad` of each parameter; `.grad` is dropped as soon as it is there."""
    params = list(model.parameters())
    buffer = torch.zeros(sum(param.numel() for param in params))

    def keep(param: Any) -> None:
        param.main_grad.add_(param.grad)
        param.grad = None

    offset = 0
    for param in params:
        param.main_grad = buffer[offset : offset + param.numel()].view_as(param)  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(keep)
        offset += param.numel()
    return buffer


def test_a_buffer_that_is_reduced_in_buckets_is_followed_for_each_parameter_once(alone: None, tmp_path: Path) -> None:
    model = Net()
    buffer = in_buffer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(2):
            buffer.zero_()
            data = [batch(0, k) for k in range(2)]
            for part in data:
                (token_sum(model, part) / sum(int((labels >= 0).sum()) for _, labels in data)).backward()
            for bucket in buffer.chunk(3):  # its borders lie inside parameters
                dist.all_reduce(bucket)
            dist.all_reduce(torch.ones(3))  # something else
            for param in model.parameters():
                param.grad = param.main_grad.clone()  # type: ignore[attr-defined]
            optimizer.step()
            model.zero_grad()
    run = read_run(tmp_path)
    reductions = [event for event in run.ranks[0].events if isinstance(event, Reduce) and event.step == 1]
    reduced = sorted(param for event in reductions for param in run.ranks[0].param_sets[event.params])
    assert reduced == list(range(5))
    assert {(event.impl, event.op, event.group) for event in reductions} == {("all_reduce", "sum", (0,))}
    report = diagnose(run)
    assert (report.verdict, report.coverage.parameters_observed) == ("clean", 5)


def info(number: int, values: Tensor) -> Any:
    return SimpleNamespace(id=number, param=values, numel=values.numel())


def test_a_shard_holds_the_end_of_one_parameter_and_the_beginning_of_the_next() -> None:
    first, second = info(0, torch.arange(10.0)), info(1, torch.arange(20.0, 26.0))
    shard = torch.cat([first.param[6:], second.param[:3]])
    assert Finder().find([shard], [first, second]) == {0: [Region(first, 6, 0, 4), Region(second, 0, 4, 3)]}


def test_shards_of_norms_are_known_by_their_place_between_others() -> None:
    params = [
        info(0, torch.arange(2.0, 10.0)),
        info(1, torch.ones(4)),
        info(2, torch.ones(6)),
        info(3, torch.arange(20.0, 24.0)),
    ]
    halves = [one.param.chunk(2)[1].clone() for one in params]
    expected = {0: (4, 4), 1: (2, 2), 2: (3, 3), 3: (2, 2)}
    found = Finder().find(halves, params)
    assert found == {i: [Region(params[i], start, 0, length)] for i, (start, length) in expected.items()}
    assert Finder().find([halves[0], halves[2], halves[3]], params).keys() == {0, 2}  # one of two norms: whose?
    others = [halves[0], torch.zeros(2), *halves[2:]]
    assert 1 not in Finder().find(others, params)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_of_constants_alone_is_the_same_part_as_the_group_before_it(rank: int) -> None:
    """ZeRO keeps each group of an optimizer flat: matrices, and norms without weight decay, which are all ones."""
    first, second = info(0, torch.arange(2.0, 12.0)), info(2, torch.arange(20.0, 30.0))
    norms = [info(1, torch.ones(6)), info(3, torch.ones(5))]
    params = [first, norms[0], second, norms[1]]
    finder, matrices = Finder(), [first.param.clone(), second.param.clone()]
    shard = [torch.ones(6), torch.cat([torch.ones(5), torch.zeros(1)])][rank]
    assert finder.find([shard], params) == {}  # whose it is nothing tells
    assert finder.find([matrices[rank]], params).keys() == {0}
    assert finder.find([shard], params) == {0: [Region(norms[rank], 0, 0, len(norms[rank].param))]}
    assert finder.find([shard, shard.clone()], params) == {}
    assert finder.find([torch.ones(3)], params) == {}  # of four ranks, where matrices are of two
    assert finder.find([torch.zeros(6)], params) == {}


def test_a_view_is_known_by_its_place_in_memory_and_not_by_its_values() -> None:
    buffer = torch.zeros(12)
    known = [Region(info(0, buffer[2:6]), 0, 0, 4)]
    assert in_memory(buffer[4:9], [(known, buffer[2:6])]) == [Region(known[0].info, 2, 0, 2)]
    assert in_memory(torch.zeros(12), [(known, buffer[2:6])]) == []
    assert in_memory(buffer.view(3, 4).t(), [(known, buffer[2:6])]) == []


def test_channels_last_is_known_by_its_place_where_it_is_all_of_a_gradient() -> None:
    grad = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    known = [Region(info(0, grad), 0, 0, grad.numel())]
    assert in_memory(grad.detach(), [(known, grad)]) == known
    in_order = grad.as_strided((grad.numel(),), (1,))
    assert in_memory(in_order, [(known, grad)]) == []
    assert in_memory(grad.clone(memory_format=torch.channels_last), [(known, grad)]) == []


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:Running .* on global rank", "ignore:.*reduce_scatter_tensor:FutureWarning")
def test_collectives_over_a_group_without_this_rank_do_nothing_as_in_torch(tmp_path: Path) -> None:
    """They warn, and neither raise nor count as a failure of a probe."""
    model, nobody = Net(), dist.GroupMember.NON_GROUP_MEMBER
    with attach(tmp_path / "run"):
        token_sum(model, batch(0, 0)).backward()
        grad = model.head.weight.grad
        assert grad is not None
        before = grad.clone()
        dist.all_reduce(grad, group=nobody)
        dist.reduce(grad, group=nobody, group_dst=0)
        dist.reduce_scatter(torch.empty_like(grad), [grad], group=nobody)
        dist.reduce_scatter_tensor(torch.empty_like(grad), grad, group=nobody)
        assert torch.equal(grad, before)
    events = read_run(tmp_path / "run").ranks[0].events
    assert not [event for event in events if isinstance(event, ProbeError | Reduce)]
