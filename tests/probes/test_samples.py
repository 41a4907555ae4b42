"""What is on an accelerator reaches the trace without anyone waiting for it, in order and whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from probe_workers import Net, batch, token_sum
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import AFTER
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.optimizers import optimizer as optimizer_probe
from gradcheck_dist.probes.recording import deferred, recorder
from gradcheck_dist.probes.recording.samples import HostCopies
from gradcheck_dist.stats.sampling import sample_positions
from gradcheck_dist.trace.run import read_run


class Late:
    """An event of an accelerator that is not done until it is told so, or waited for."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def test_copies_are_handed_on_in_order_once_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, events, arrived = HostCopies(), [Late(), Late()], list[float]()
    waiting = iter(events)
    monkeypatch.setattr(copies, "start", lambda tensor: (next(waiting), tensor))
    copies.bring(torch.tensor(1.0), lambda host: arrived.append(float(host)))
    copies.bring(torch.tensor(2.0), lambda host: arrived.append(float(host)))
    events[1].done = True
    copies.poll()
    assert arrived == []
    events[0].done = True
    copies.poll()
    assert arrived == [1.0, 2.0]


def test_what_is_on_the_host_arrives_at_once() -> None:
    arrived: list[float] = []
    HostCopies().bring(torch.tensor(3.0), lambda host: arrived.append(float(host)))
    assert arrived == [3.0]


def test_a_step_on_an_accelerator_is_recorded_without_waiting_and_judged_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: HostCopies, tensor: Tensor) -> tuple[Late, Tensor]:
        return Late(), tensor

    # A CPU that behaves as an accelerator: nothing may be read before it was waited for at the end.
    monkeypatch.setattr(HostCopies, "start", start)
    for module in (deferred, recorder, optimizer_probe):
        monkeypatch.setattr(module, "is_host", lambda value: False)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path) as session:
        data = [batch(0, k) for k in range(2)]
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        for part in data:
            (token_sum(model, part) / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        assert read_run(tmp_path).ranks[0].samples == []
        assert session.recorder.writer.error is None
    run = read_run(tmp_path)
    assert run.ranks[0].samples
    report = diagnose(run)
    assert (report.verdict, report.reasons) == ("clean", [])
    assert {round(weight.ratio or 0, 5) for weight in report.weights} == {1.0}


class Mixed(torch.nn.Module):
    """Gradients of several types and layouts, and two parameters that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = torch.nn.Embedding(8, 4, sparse=True)
        self.wide = torch.nn.Linear(4, 300, bias=False)
        self.in_float64 = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.empty = torch.nn.Parameter(torch.randn(0))
        self.sometimes = torch.nn.ParameterList([torch.randn(7) for _ in range(2)])

    def forward(self, index: Tensor, used: int) -> Tensor:
        hidden = checkpoint(self.wide, self.sparse(index), use_reentrant=True)  # a pass inside of a pass
        whole = checkpoint(self.wide, self.sparse(index + 1), use_reentrant=True)
        terms = [hidden.square().sum() + whole.sum(), self.in_float64.square().sum().float(), self.empty.sum()]
        return sum(terms, torch.zeros(())) + sum(self.sometimes[at].square().sum() for at in range(used))


@pytest.mark.parametrize("only", ["", "sometimes"], ids=["types and layouts mixed", "one type, some missing"])
def test_what_is_kept_of_a_gradient_are_its_own_values(tmp_path: Path, only: str) -> None:
    torch.manual_seed(0)
    model = Mixed()
    for name, param in model.named_parameters():
        param.requires_grad_(only in name)
    seen: list[dict[str, Tensor]] = []
    with attach(tmp_path):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for used in (2, 1, 0, 2):
            if only and not used:
                continue
            model(torch.arange(4), used).backward()
            grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
            seen.append({name: grad.to_dense().clone() for name, grad in grads.items()})
            optimizer.step()
            optimizer.zero_grad()
    trace = read_run(tmp_path).ranks[0]
    names = {param.id: param.name for param in trace.params.values()}
    kept: dict[tuple[int, str], Tensor] = {}
    for record in trace.samples:
        rows = np.frombuffer(record.rows, dtype="<i4").reshape(-1, 4)
        counts = [trace.plans[plan].num_values for plan in rows[:, 3]]
        values = torch.frombuffer(bytearray(record.values), dtype=getattr(torch, record.dtype)).split(counts)
        for (_, role, param, _), row in zip(rows.tolist(), values, strict=True):
            if role == AFTER:
                kept[record.step, names[param]] = row
    expected = {(step, name): grad for step, grads in enumerate(seen) for name, grad in grads.items() if grad.numel()}
    assert {key for key, row in kept.items() if len(row)} == set(expected)
    for (step, name), grad in expected.items():
        positions = torch.from_numpy(sample_positions(str(tuple(grad.shape)), grad.numel(), 96).astype("int64"))
        assert torch.equal(kept[step, name], grad.take(positions)), (step, name)


def test_what_was_read_can_still_be_freed_and_grown(tmp_path: Path) -> None:
    """`Tensor.numpy()` would have marked labels and gradients as not resizable."""
    model = torch.nn.Linear(8, 10_000)
    tokens, labels = torch.randn(4, 8), torch.arange(4)
    with attach(tmp_path):
        torch.nn.functional.cross_entropy(model(tokens), labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    labels.resize_(8)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.resize_(param.numel() + 1)
        param.grad.untyped_storage().resize_(0)
