"""Several devices in one process, gradients that go to the host, devices without memory, tensors without values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elsewhere import Late, pretend
from offload_workers import WRONG
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.parameters.registry import LocalPlan, Registry
from gradcheck_dist.probes.recording.deferred import stacked
from gradcheck_dist.probes.recording.samples import HostCopies, Sampler
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


def test_samples_of_one_type_on_several_devices_are_brought_apart() -> None:
    sampler = Sampler(Registry(lambda _: None, 0))
    plan = LocalPlan(0, 0, [0, 1], torch.device("cpu"))
    for device in ("cpu", "meta", "cpu"):
        sampler.keep(1, 0, plan, torch.ones(2, device=device))
    found = sampler.drain()
    assert [(name, len(rows), values.device.type, len(values)) for name, rows, values in found] == [
        ("float32", 32, "cpu", 16),
        ("float32", 16, "meta", 8),
    ]


def test_numbers_of_several_devices_arrive_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, arrived = HostCopies(), list[list[int]]()
    start = copies.start

    def started(tensor: Tensor) -> tuple[Any, Tensor]:
        return (Late(), torch.full(tensor.shape, 7)) if tensor.is_meta else start(tensor)

    monkeypatch.setattr(copies, "start", started)
    numbers = [torch.tensor(1), torch.empty((), dtype=torch.int64, device="meta"), torch.tensor(3)]
    copies.bring_together(numbers, lambda host: arrived.append(host.tolist()))
    copies.poll()
    assert arrived == []
    copies.poll(wait=True)
    assert arrived == [[1, 7, 3]]
    copies.bring_together(numbers[::2], lambda host: arrived.append(host.tolist()))
    copies.poll(wait=True)
    assert arrived[1:] == [[1, 3]]


def test_what_is_compared_meets_on_an_accelerator() -> None:
    assert stacked([torch.ones((), device="meta"), torch.ones(())]).device.type == "meta"
    assert stacked([torch.ones(()), torch.zeros(())]).tolist() == [1.0, 0.0]


def train(model: nn.Module, aside: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(torch.randn(3, 4)), torch.tensor([0, 1, 2])) / 2
            aside()
            loss.backward()
        aside()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("which", range(1, 13))
def test_a_device_without_memory_accuses_nobody_and_shifts_no_step(
    which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time that something is brought to the host it may fail, and the steps keep their numbers."""
    pretend(monkeypatch)
    bring, times = HostCopies.bring, []

    def short(self: HostCopies, tensor: Tensor, arrived: Callable[[Tensor], None]) -> None:
        times.append(tensor)
        if len(times) == which:
            raise torch.OutOfMemoryError("no memory is left")
        bring(self, tensor, arrived)

    monkeypatch.setattr(HostCopies, "bring", short)
    with attach(tmp_path) as session:
        train(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        assert session.recorder.step == 2
    report = diagnose(read_run(tmp_path))
    assert report.findings == []
    assert any("no memory is left" in str(problem) for problem in report.coverage.problems) == (which <= len(times))


def test_training_on_tensors_without_values_is_none(tmp_path: Path) -> None:
    def aside() -> None:
        with FakeTensorMode():
            model = nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            rows = torch.randn(3, 4, requires_grad=True)
            nn.functional.cross_entropy(model(rows), torch.zeros(3, dtype=torch.int64)).backward()
            torch.autograd.grad(model(rows).sum(), rows)
            optimizer.step()
            optimizer.zero_grad()

    with attach(tmp_path):
        train(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), aside)
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings, report.coverage.problems) == ("clean", [], [])
    assert report.run.steps == [0, 1, 2]


def test_what_make_fx_writes_down_is_no_training_and_holds_nothing_of_the_probes(tmp_path: Path) -> None:
    """flex_attention without torch.compile traces its own backward so, while the trainer's backward runs."""

    def written_down(model: nn.Module) -> list[str]:
        def gradient(rows: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(rows), torch.zeros(3, dtype=torch.int64))
            return torch.autograd.grad(loss, rows)[0]

        graph = make_fx(gradient)(torch.ones(3, 4, requires_grad=True)).graph
        return [str(node.target) for node in graph.nodes]

    traced: list[list[str]] = []
    other = nn.Linear(4, 4)
    plain = written_down(other)
    with attach(tmp_path):
        train(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), lambda: traced.append(written_down(other)))
    assert traced and all(one == plain for one in traced)
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings, report.coverage.problems) == ("clean", [], [])


@pytest.mark.slow
@pytest.mark.parametrize(("divided_twice", "codes"), [(False, []), (True, ["GS101"])])
def test_gradients_that_fsdp_copies_to_the_host_are_read_when_they_are_there(
    divided_twice: bool, codes: list[str], tmp_path: Path
) -> None:
    launch("offload_workers:train", (str(tmp_path / "run"), divided_twice), 2, timeout_s=100)
    run = read_run(tmp_path / "run")
    for of_rank in run.ranks.values():
        for samples in of_rank.samples:
            assert WRONG not in np.frombuffer(samples.values, samples.dtype)
    assert [finding.code for finding in diagnose(run).findings] == codes
