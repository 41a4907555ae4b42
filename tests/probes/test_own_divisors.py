"""Losses that divide by statistics of the trainer's own, which change from pass to pass, accuse nobody; counts do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged, record
from torch import nn

PASSES = 3


class RunningMean:
    """0.9 of what it was and a tenth of a pass's tokens."""

    def __init__(self) -> None:
        self.value = 13.7

    def __call__(self, tokens: int) -> float:
        self.value = 0.9 * self.value + 0.1 * tokens
        return self.value


class MeanSoFar:
    """The mean of the tokens of all passes of the run."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, tokens: int) -> float:
        self.counts.append(tokens)
        return sum(self.counts) / len(self.counts)


class Total:
    """Tokens of all passes of the run up to this one: a count that goes on while it is used."""

    def __init__(self) -> None:
        self.value = 0

    def __call__(self, tokens: int) -> float:
        self.value += tokens
        return self.value


def root(tokens: int) -> float:
    return float(tokens**0.5)


def padded(tokens: int) -> float:
    return tokens + 5


@pytest.mark.parametrize(
    ("make", "dtype", "multiple", "verdict"),
    [
        (RunningMean, torch.float32, 1, "undetermined"),
        (RunningMean, torch.float32, 4, "undetermined"),
        (RunningMean, torch.bfloat16, 1, "undetermined"),
        (MeanSoFar, torch.float32, 1, "undetermined"),
        (lambda: root, torch.float32, 1, "undetermined"),
        (Total, torch.float32, 1, "findings"),
        (Total, torch.float32, 4, "findings"),
        (lambda: padded, torch.float32, 1, "findings"),
        (lambda: lambda _: 40.0, torch.bfloat16, 1, "findings"),
    ],
    ids=["running", "of fours", "bfloat16", "so far", "root", "total", "total of fours", "padded", "constant"],
)
def test_what_a_pass_divides_by_is_a_fault_where_it_counts(
    tmp_path: Path, make: Callable[[], Callable[[int], float]], dtype: torch.dtype, multiple: int, verdict: str
) -> None:
    divisor, seeds = make(), count()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.to(dtype)
        for _ in range(PASSES):
            generator = torch.Generator().manual_seed(next(seeds))
            tokens = torch.randint(0, 20, (2, 24), generator=generator)
            labels = torch.randint(0, 20, (48,), generator=generator)
            num = multiple * int(torch.randint(16 // multiple, 48 // multiple, (1,), generator=generator))
            labels[num:] = -100
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels, reduction="sum")
            (loss / (divisor(num) * PASSES)).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=3)
    report = judged(tmp_path / "run")
    assert report.verdict == verdict, report
    if verdict == "undetermined":
        assert "by backward pass" in report.reasons[0] and "a running mean" in report.reasons[0]
        assert "a division by the tokens of the step in its place" in report.next_step
        assert ("rounded so far" in report.reasons[0]) == (dtype is torch.bfloat16)


def test_what_is_counted_is_told_behind_a_loss_scale(tmp_path: Path) -> None:
    seeds, scaler = count(), torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens, labels = torch.randint(0, 20, (2, 24)), torch.randint(0, 20, (48,))
        num = 30 + 3 * next(seeds)
        labels[num:] = -100
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels, reduction="sum")
        scaler.scale(loss / (num + 5)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=3)
    (finding,) = judged(tmp_path / "run").findings
    assert (finding.code, finding.steps) == ("GS303", [0, 1, 2])
    assert "as if the step had 35 tokens, where 30 enter" in finding.explanation


def test_a_loss_scale_that_changes_between_passes_is_told_and_not_named_after_a_degree(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for k in range(2):
            tokens, labels = torch.randint(0, 20, (2, 24)), torch.randint(0, 20, (48,))
            scaler.scale(F.cross_entropy(model(tokens).flatten(0, 1), labels, reduction="sum") / 96).backward()
            if k == 0:
                scaler.update(scaler.get_scale() * 2)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    record(step, tmp_path / "run")
    (finding,) = judged(tmp_path / "run").findings
    assert (finding.code, finding.factor.expression) == ("GS000", "0.5^(K-1-k)")
    assert "A loss scale that changes between passes" in finding.explanation and "scaler.update()" in finding.fix
