"""Whatever function of a probe fails, training goes on, bit for bit: a hook that raises would end a backward pass.

The functions that run as a small loop trains are found by `sys.setprofile`, and each raises once, as it begins.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from framework_workers import TokenLosses
from torch import Tensor, nn

from gradcheck_dist import probes
from gradcheck_dist.events import ProbeError
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

PROBES = str(Path(probes.__file__).parent)
Function = tuple[str, str, int]
"""File, name and first line."""
LABELS = torch.arange(6) % 5
NOTHING_TO_FAIL = {
    *("<listcomp>", "<genexpr>"),  # the function around them raises in their place
    *("arrived", "make", "rest", "under_way", "end_step_if_open", "call", "counted", "enter", "leave", "_closure"),
    *("_may_be_of_gradients", "_readable", "__init__", "multiply"),
}
"""What stands between the program and the first guarded function, and does no more than read attributes."""


def squared(logits: Tensor) -> Tensor:
    return F.mse_loss(logits, F.one_hot(LABELS, 5).float())


def hooked(logits: Tensor) -> Tensor:
    logits.register_hook(lambda grad: grad * 0.5)
    return F.cross_entropy(logits, LABELS)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy and a penalty": lambda logits: F.cross_entropy(logits, LABELS) + 0.1 * logits.abs().mean(),
    "picked log-probabilities": lambda logits: -logits.log_softmax(-1).gather(-1, LABELS[:, None]).mean(),
    "a function of one's own": lambda logits: TokenLosses.apply(logits, LABELS).mean(),  # type: ignore[no-untyped-call]
    "soft targets": lambda logits: -(F.one_hot(LABELS, 5) * 0.9 + 0.02).mul(logits.log_softmax(-1)).sum(-1).mean(),
    "a hook": hooked,
    "two distances": lambda logits: squared(logits) + 0.1 * logits.abs().mean(),
}


class InjectedError(RuntimeError):
    pass


def trained(loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        (loss(model(torch.randn(6, 6))) / 2).backward()
        (loss(model(torch.randn(6, 6))) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def recorded(folder: Path, loss: Callable[[Tensor], Tensor], fails: Function | None) -> tuple[Any, set[Function]]:
    """What was trained, and the functions of probes that others of them called; `fails` raises when it begins."""
    seen: Counter[Function] = Counter()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or not code.co_filename.startswith(PROBES) or code.co_filename.endswith("guard.py"):
            return
        if caller is None or not caller.f_code.co_filename.startswith(PROBES):
            return
        function = (code.co_filename, code.co_name, code.co_firstlineno)
        seen[function] += 1
        if function == fails and seen[function] == 1:
            raise InjectedError

    with attach(folder):
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            return trained(loss), set(seen)
        finally:
            sys.setprofile(before)


@pytest.mark.timeout(300)
def test_no_failure_of_a_probe_reaches_training(tmp_path: Path) -> None:
    tried: set[Function] = set()
    for loss in LOSSES.values():
        expected = trained(loss)
        _, functions = recorded(tmp_path / f"run{len(tried)}", loss, None)
        for function in sorted(one for one in functions - tried if one[1] not in NOTHING_TO_FAIL):
            got, _ = recorded(tmp_path / str(len(tried)), loss, function)
            assert all(map(torch.equal, got, expected)), function
            tried.add(function)
    assert len(tried) > 150


def test_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no elements")

    monkeypatch.setattr("gradcheck_dist.probes.losses.means.element_weights", broken)
    with attach(tmp_path):
        trained(squared)
    events = [event for event in read_run(tmp_path).ranks[0].events if isinstance(event, ProbeError)]
    assert {event.message for event in events} == {"RuntimeError: no elements"}
