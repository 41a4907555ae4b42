"""Passes whose losses lines multiply by a number each: sources of data with coefficients, or what is wrong in one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net
from torch import Tensor

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

SIZES = (16, 48, 32)
EQUAL = (24, 24, 24)
source_weights = (1.0, 0.5, 0.25)
Loss = Callable[[Tensor, int, Sequence[int]], Tensor]
"""What becomes of the mean of the pass of that number, of so many tokens in each pass."""


def trained(folder: Path, loss: Loss, sizes: Sequence[int]) -> Report:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run"):
        for _ in range(2):
            for k, size in enumerate(sizes):
                tokens, labels = torch.randint(20, (2, 4, size // 4))
                mean = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                loss(mean, k, sizes).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(folder / "run"))


def by_source(mean: Tensor, k: int, _: Sequence[int]) -> Tensor:
    return mean * {0: 1.0, 1: 0.5, 2: 0.2}[k]


def replayed(mean: Tensor, k: int, _: Sequence[int]) -> Tensor:
    return mean * 0.3 if k == 2 else mean


@pytest.mark.parametrize("sizes", [SIZES, EQUAL])
@pytest.mark.parametrize("loss", [by_source, replayed])
def test_sources_may_have_coefficients_of_their_own(tmp_path: Path, loss: Loss, sizes: Sequence[int]) -> None:
    report = trained(tmp_path, loss, sizes)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("test_sources.py" in one and "sources of data" in one for one in report.reasons), report.reasons


def weighted_and_divided(mean: Tensor, k: int, sizes: Sequence[int]) -> Tensor:
    return source_weights[k] * mean / len(sizes)


def last_is_doubled(mean: Tensor, k: int, sizes: Sequence[int]) -> Tensor:
    mean = mean / len(sizes)
    return mean * 2 if k == 2 else mean


def last_is_divided(mean: Tensor, k: int, _: Sequence[int]) -> Tensor:
    return mean / 3 if k == 2 else mean


def shares_of_too_many(mean: Tensor, k: int, sizes: Sequence[int]) -> Tensor:
    return mean * (sizes[k] / 128)


@pytest.mark.parametrize(
    ("loss", "sizes"),
    [(weighted_and_divided, EQUAL), (last_is_doubled, EQUAL), (last_is_divided, EQUAL), (shares_of_too_many, SIZES)],
)
def test_what_divides_or_follows_counts_is_no_coefficient(tmp_path: Path, loss: Loss, sizes: Sequence[int]) -> None:
    assert trained(tmp_path, loss, sizes).verdict == "findings"


def in_turns(
    folder: Path, turns: int, divisors: tuple[int, int], *, one_line: bool, unlike: int = 0, clips: bool = False
) -> Report:
    """Two sources, the second times 0.2, each with a backward line of its own in every turn of an accumulation loop, on
    batches of which each second one of a source has so many more tokens. `clips`: behind every turn."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def mean(num: int) -> Tensor:
        tokens, labels = torch.randint(20, (2, 4, num))
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    with attach(folder / "run"):
        for _ in range(2):
            for turn in range(turns):
                num = 6 + turn % 2 * unlike
                if one_line:
                    for divisor, source_weight in zip(divisors, (1.0, 0.2), strict=True):
                        (mean(num) / divisor * source_weight).backward()
                else:
                    (mean(num) / divisors[0]).backward()
                    (mean(num + 2) / divisors[1] * 0.2).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(folder / "run"))


@pytest.mark.parametrize("unlike", [0, 3])
def test_sources_with_a_line_each_may_be_divided_by_the_turns_of_their_loop(tmp_path: Path, unlike: int) -> None:
    report = in_turns(tmp_path, 2, (2, 2), one_line=False, unlike=unlike)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "x 1 and x 0.2 of a mean over their own tokens" in report.reasons[0]
    assert ("count alike, however many" in report.reasons[0]) == bool(unlike)


@pytest.mark.parametrize("unlike", [0, 3])
def test_what_else_is_wrong_with_sources_does_not_accuse_their_coefficients(tmp_path: Path, unlike: int) -> None:
    report = in_turns(tmp_path, 2, (2, 2), one_line=False, unlike=unlike, clips=True)
    assert [finding.code for finding in report.findings] == ["GS605"]


@pytest.mark.parametrize(("divisors", "one_line"), [((1, 2), False), ((2, 1), False), ((4, 4), False), ((2, 2), True)])
def test_sources_that_are_divided_otherwise_are_found(
    tmp_path: Path, divisors: tuple[int, int], one_line: bool
) -> None:
    """One of them alone, both twice, or passes of one line, which may as well be one loss's."""
    assert in_turns(tmp_path, 2, divisors, one_line=one_line).verdict == "findings"


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_lines_that_lead_into_a_library_tell_losses_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_a_loop: bool
) -> None:
    """`accelerator.backward(loss)` begins every pass on one line of its own."""
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "engine_of_sources.py").write_text("def backward(loss):\n    loss.backward()\n")
    monkeypatch.syspath_prepend(packages)
    backward = importlib.import_module("engine_of_sources").backward
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(2):
            (one, other), (two, twice) = torch.randint(20, (2, 4, 4)), torch.randint(20, (2, 4, 9))
            if in_a_loop:
                for tokens, labels in ((one, other), (two, twice)):
                    backward(F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()))
            else:
                backward(F.cross_entropy(model(one).flatten(0, 1), other.flatten()))
                backward(F.cross_entropy(model(two).flatten(0, 1), twice.flatten()))
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose(read_run(tmp_path / "run")).verdict == ("findings" if in_a_loop else "undetermined")
