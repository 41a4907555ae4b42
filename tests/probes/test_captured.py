"""CUDA graphs, on a stand-in for CUDA: a capture is left alone, and what is replayed from one accuses nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Backward, OptimizerStep, ProbeError, StepEnd
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.recording import captured
from gradcheck_dist.probes.recording.samples import HostCopies
from gradcheck_dist.trace.run import read_run

Work = Callable[[], Any]


class Graph:
    """What a CUDA graph does: `capture` runs Python and computes nothing, `replay` computes and runs no Python.

    On the CPU a capture computes too, so parameters and gradients are put back behind it; a replay runs with all hooks
    of autograd and optimizers passed by, as `work` of plain tensor operations.
    """

    def __init__(self, work: Work) -> None:
        self.work = work

    def replay(self) -> None:
        torch.cuda.CUDAGraph.replay(self)  # type: ignore[arg-type]
        self.work()


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the current stream is capturing, as torch would answer."""
    capturing = [False]

    def begin(_graph: Any, *_: Any, **__: Any) -> None:
        capturing[0] = True

    def end(_graph: Any) -> None:
        capturing[0] = False

    monkeypatch.setattr(captured, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda _graph: None)
    # The generators of a stand-in have no state.
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    bring, poll = HostCopies.bring, HostCopies.poll

    def watched(original: Any) -> Any:
        def call(self: HostCopies, *args: Any, **kwargs: Any) -> None:
            assert not capturing[0], "a copy or an event's query inside of a capture"
            original(self, *args, **kwargs)

        return call

    monkeypatch.setattr(HostCopies, "bring", watched(bring))
    monkeypatch.setattr(HostCopies, "poll", watched(poll))
    yield capturing


class Trainer:
    """Two microbatches a step; the loss divides by 2 as it must."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 5)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.input, self.labels = torch.randn(4, 8), torch.randint(5, (4,))

    def backward(self) -> None:
        (cross_entropy(self.model(self.input), self.labels) / 2).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def captured(self, *works: Work) -> Graph:
        """A graph of these parts. Nothing that the capture computes stays."""
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        graph = Graph(lambda: None)
        torch.cuda.CUDAGraph.capture_begin(graph)  # type: ignore[arg-type]
        for work in works:
            work()
        torch.cuda.CUDAGraph.capture_end(graph)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(before)
                assert parameter.grad is not None
                parameter.grad.zero_()
        graph.work = self.accumulate if self.step not in works else lambda: None
        return graph

    @torch.no_grad()
    def accumulate(self) -> None:
        """The gradient of `backward` without autograd."""
        slope = torch.softmax(self.model(self.input), 1)
        slope[torch.arange(4), self.labels] -= 1
        weight, bias = self.model.weight.grad, self.model.bias.grad
        assert weight is not None and bias is not None
        weight += slope.T @ self.input / 8
        bias += slope.sum(0) / 8


def judged(folder: Path) -> tuple[Report, list[Any]]:
    run = read_run(folder)
    events = run.ranks[0].events
    assert not [event for event in events if isinstance(event, ProbeError)]
    return diagnose(run), events


def test_a_capture_is_no_step_and_steps_before_it_are_judged(tmp_path: Path) -> None:
    trainer = Trainer()
    with attach(tmp_path):
        for _ in range(2):
            trainer.backward()
            trainer.backward()
            trainer.step()
        graph = trainer.captured(trainer.backward, trainer.backward, trainer.step)
        for _ in range(3):
            graph.replay()
    report, events = judged(tmp_path)
    assert (report.verdict, report.findings) == ("clean", [])
    assert [event.step for event in events if isinstance(event, Backward)] == [0, 0, 1, 1]
    assert [event.step for event in events if isinstance(event, StepEnd)] == [0, 1, 2, 3, 4]
    assert "before the capture (--steps)" in {m.probe: m.reason for m in report.coverage.probes_missing}["cuda_graphs"]


def test_a_step_of_which_a_part_is_replayed_is_left_open(tmp_path: Path) -> None:
    trainer = Trainer()
    with attach(tmp_path):
        trainer.backward()
        trainer.backward()
        trainer.step()
        graph = trainer.captured(trainer.backward)
        trainer.backward()
        graph.replay()
        trainer.step()
    report, events = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert [reason for reason in report.reasons if "a part of the step was replayed from a CUDA graph" in reason]
    assert sum(isinstance(event, OptimizerStep) for event in events) == 2
    assert {weight.step for weight in report.weights} == {0}


def test_a_run_that_only_replays_says_so(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.backward()
    with attach(tmp_path):
        graph = trainer.captured(trainer.backward)
        for _ in range(2):
            graph.replay()
            trainer.step()
    report, events = judged(tmp_path)
    assert report.verdict == "undetermined"
    assert any("every backward pass was replayed" in reason for reason in report.reasons)
    assert not [event for event in events if isinstance(event, Backward)]


def test_a_capture_that_torch_did_not_begin_and_one_inside_of_a_pass_are_left_alone(
    tmp_path: Path, cuda: list[bool]
) -> None:
    trainer = Trainer()
    inner = Graph(lambda: None)

    class Graphed(torch.autograd.Function):
        """As torch.compile's "reduce-overhead": backward captures, or replays, a graph of its own."""

        @staticmethod
        def forward(_ctx: Any, loss: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            torch.cuda.CUDAGraph.capture_begin(inner)  # type: ignore[arg-type]
            torch.cuda.CUDAGraph.capture_end(inner)  # type: ignore[arg-type]
            torch.cuda.CUDAGraph.replay(inner)  # type: ignore[arg-type]
            return grad

    with attach(tmp_path):
        for _ in range(2):
            for _ in range(2):
                loss = cross_entropy(trainer.model(trainer.input), trainer.labels) / 2
                Graphed.apply(loss).backward()
            cuda[0] = True
            cross_entropy(trainer.model(trainer.input), trainer.labels)
            cuda[0] = False
            trainer.step()
    report, events = judged(tmp_path)
    assert (report.verdict, report.findings) == ("clean", [])
    assert sum(isinstance(event, Backward) for event in events) == 4
