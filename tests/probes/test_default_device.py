"""A user may set torch's default device and type: what probes keep for themselves lies where they want it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged
from probe_workers import Net, batch
from torch import Tensor

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import Reduce
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.losses.closed_form import evenly
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch

FACTORIES = {
    "arange",
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """What is made without naming a device holds no numbers, and few of their digits."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def test_a_collective_that_a_default_device_calls_again_is_one(tmp_path: Path) -> None:
    """torch hands it to the mode that sets the device, which calls it by its name."""
    launch("default_device_workers:train", (str(tmp_path),), 2, timeout_s=100)
    run = read_run(tmp_path)
    report = diagnose(run)
    assert (report.verdict, report.coverage.problems) == ("clean", []), report.reasons
    for trace in run.ranks.values():
        reduced = [trace.param_sets[event.params] for event in trace.events if isinstance(event, Reduce)]
        assert len(reduced) == 2 * len(set(reduced))


@pytest.fixture
def made() -> tuple[Net, list[tuple[Tensor, Tensor]]]:
    return Net(), [batch(0, k) for k in range(3)]


@pytest.mark.parametrize("divided", [True, False])
def test_recording_under_another_default_device_and_type(
    tmp_path: Path, made: tuple[Net, list[tuple[Tensor, Tensor]]], elsewhere: None, divided: bool
) -> None:
    model, data = made
    total = sum(int((labels >= 0).sum()) for _, labels in data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(2):
            for tokens, labels in data:
                loss = F.cross_entropy(
                    model(tokens).flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1
                )
                (loss / (total if divided else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert report.coverage.problems == []
    assert (report.verdict, len(report.findings)) == (("clean", 0) if divided else ("findings", 1))


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 1001])
def test_evenly_spread_elements_have_the_ends_among_them(num: int) -> None:
    found = evenly(torch.arange(num) * 3, 8).tolist()
    assert len(found) == min(num, 8) and len(set(found)) == len(found)
    assert found[:1] + found[-1:] == ([0, 3 * (num - 1)] if num else [])


def _without_device(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if of_torch and not any(given.arg == "device" for given in node.keywords):
                yield node.lineno


def test_whatever_makes_a_tensor_says_where() -> None:
    root = Path(gradcheck_dist.__file__).parent
    rooms = [path for room in ("probes", "verify", "stats", "boot") for path in (root / room).rglob("*.py")]
    found = [f"{path.relative_to(root)}:{line}" for path in rooms for line in _without_device(path)]
    assert found == []
