"""Numbers that lie on an accelerator are read when they have come; what has no value of its own never comes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from elsewhere import pretend
from torch import nn

from gradcheck_dist.events import LossGradient, LossTerm, ProbeError, RootValue, Tokens
from gradcheck_dist.probes import attach, session
from gradcheck_dist.probes.losses import tokens
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run


@guarded("probe")
def tell(recorder: Recorder, value: torch.Tensor) -> None:
    recorder.emit(RootValue, accumulation_step=0, microbatch=0, value=value)


def numbers_beside_losses(run: Path) -> list[tuple[object, ...]]:
    """What multiplies and divides a cross-entropy beside a penalty, and two means of squares, in tensors that are used
    again."""
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share, count = torch.tensor(0.5), torch.tensor(6.0)
    with attach(run):
        for _ in range(2):
            rows = torch.randn(6, 8)
            loss = nn.functional.cross_entropy(model(rows), torch.randint(5, (6,)), reduction="sum")
            ((loss * 3.0 + share * model.weight.square().sum()) / count).backward()
            (((model(rows) - 1) ** 2).mean() * share / 4 + (model.bias**2).mean() / count).backward()
            share.add_(1.0)
            count.mul_(2.0)
            optimizer.step()
            optimizer.zero_grad()
    events = read_run(run).ranks[0].events
    assert not [event for event in events if isinstance(event, ProbeError)]
    return [
        (event.op, event.weight, event.num_factors, event.divided_by, event.mean_weight)
        if isinstance(event, LossTerm)
        else (event.weight, event.multipliers, event.divisors, event.sum_before)
        for event in sorted(events, key=lambda event: event.seq)
        if isinstance(event, LossGradient | LossTerm)
    ]


def test_numbers_on_an_accelerator_are_told_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = numbers_beside_losses(tmp_path / "here")
    assert {number for told in here for number in told if isinstance(number, int)} == {0, 1, 2}
    assert [told[1] for told in here if isinstance(told[1], list)] == [[3.0], [3.0]]
    pretend(monkeypatch)
    assert numbers_beside_losses(tmp_path / "elsewhere") == here


def test_a_number_that_a_tracer_holds_is_a_probes_error_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for _ in range(2):
            nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(5, (6,))).backward()
            assert session._session is not None
            tell(session._session.recorder, torch.zeros((), device="meta"))
            tell(session._session.recorder, torch.tensor(3.0))
            optimizer.step()
            optimizer.zero_grad()
    events = read_run(tmp_path / "run").ranks[0].events
    errors = [event for event in events if isinstance(event, ProbeError)]
    assert len(errors) == 2 and "no number that could be read later" in errors[0].message
    assert [event.value for event in events if isinstance(event, RootValue)].count(3.0) == 2
    assert diagnose_run(tmp_path / "run").verdict == "clean"


def test_a_step_ends_in_the_trace_when_all_of_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training runs ahead of an accelerator by several steps, and the run is judged step by step."""
    pretend(monkeypatch)
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run", steps=range(8)):
        for _ in range(8):
            nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(5, (6,))).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose_run(tmp_path / "run")
    assert (report.verdict, report.reasons) == ("clean", [])


def test_what_waits_to_be_made_is_not_lost_with_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, calls = tokens.runs, []

    def once(now: np.ndarray) -> np.ndarray:
        calls.append(now)
        if len(calls) == 2:  # the first is written by itself
            raise MemoryError
        return runs(now)

    monkeypatch.setattr(tokens, "runs", once)
    model = nn.Linear(8, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for _ in range(4):
            (nn.functional.cross_entropy(model(torch.randn(40, 8)), torch.randint(50, (40,))) / 4).backward()
        optimizer.step()
    events = read_run(tmp_path / "run").ranks[0].events
    assert [event.message for event in events if isinstance(event, ProbeError)] == ["MemoryError: "]
    assert len([event for event in events if isinstance(event, Tokens)]) == 3
