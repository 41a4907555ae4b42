"""Impulse mode: weights to the last digit, for the price of the step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Run

LOW_PRECISION = """
import os, torch
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
model = torch.nn.Linear(16, 8).bfloat16()
before = model.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
import atexit
atexit.register(print, "nothing of the user's own runs any more")
for k in range(12):
    loss = cross_entropy(model(torch.randn(4, 16).bfloat16()).float(), torch.randint(8, (4,)))
    (loss / DIVISOR).backward()
assert torch.equal(before, model.weight)
optimizer.step()
print("trained on")
"""


@pytest.mark.long
@pytest.mark.parametrize(("divisor", "ratio"), [("12", 1.0), ("1", 12.0)])
def test_many_contributions_in_bfloat16_are_told_to_the_last_digit(run: Run, divisor: str, ratio: float) -> None:
    code = LOW_PRECISION.replace("DIVISOR", divisor)
    done = run(code, options=("--exact", "--format", "json"), prelude="")
    assert done.code == 0
    assert "trained on" not in done.stdout
    assert "nothing of the user's" not in done.stdout
    assert "--exact: stopped before the optimizer applied step 0" in done.stderr
    report = json.loads(done.stdout)
    assert [finding["code"] for finding in report["findings"]] == ([] if ratio == 1.0 else ["GS303"])
    weights = [weight["ratio"] for weight in report["weights"]]
    assert len(weights) == 12
    assert max(abs(weight / ratio - 1) for weight in weights) < 1e-6


def test_a_later_step_can_be_read_and_training_goes_on_until_then(run: Run) -> None:
    done = run("train(3, before=lambda step, k: print(step, k, flush=True))", options=("--exact", "--steps", "1:3"))
    assert done.stdout.split() == ["0", "0", "0", "1", "1", "0", "1", "1"]
    assert "CLEAN" in done.stderr


def test_nothing_is_replaced_unless_asked_for(run: Run, tmp_path: Path) -> None:
    assert "--exact" not in run("train()").stderr
