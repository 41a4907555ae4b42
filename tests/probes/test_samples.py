"""What is on an accelerator reaches the trace without anyone waiting for it, in order and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from probe_workers import Net, batch, token_sum
from torch import Tensor

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.recorder import Recorder
from gradcheck_dist.probes.samples import HostCopies
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
    monkeypatch.setattr(Recorder, "is_host", staticmethod(lambda value: False))
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
