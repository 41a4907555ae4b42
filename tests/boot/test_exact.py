"""Impulse mode: weights to the last digit, for the price of the step."""

from __future__ import annotations

import json
import sys
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


SEQUENCE_PARALLEL = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear
dist.init_process_group("gloo")
rank = dist.get_rank()

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(2)[rank].contiguous()

class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        part = part.clone()
        dist.all_reduce(part)
        return part
    @staticmethod
    def backward(ctx, grad):
        return grad

torch.manual_seed(0)
norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
after = nn.Linear(8, 5)
torch.manual_seed(1 + rank)
up, down = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8, 8) / 3)
optimizer = torch.optim.SGD([*norms.parameters(), *after.parameters(), up, down], lr=0.1)
data = torch.Generator().manual_seed(5)
for k in range(3):
    inputs, labels = torch.randn(12, 8, generator=data), torch.randint(5, (12,), generator=data)
    part = inputs.chunk(2)[rank]
    for norm in norms:
        part = part + torch.tanh(norm(part))
    hidden = Add.apply(linear(torch.tanh(linear(Gather.apply(part), up)), down))
    (cross_entropy(after(hidden), labels, reduction="sum") / 36).backward()
for param in norms.parameters():
    dist.all_reduce(param.grad)
    if TWICE:
        dist.all_reduce(param.grad)
optimizer.step()
"""


@pytest.mark.parametrize(("twice", "codes"), [("False", []), ("True", ["GS102"])], ids=["right", "summed twice"])
def test_summands_of_ranks_that_share_their_tokens_stay_summands(run: Run, twice: str, codes: list[str]) -> None:
    code = SEQUENCE_PARALLEL.replace("TWICE", twice)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = run(code, options=("--exact", "--format", "json"), prelude="", command=torchrun)
    report = json.loads(done.stdout)
    assert [finding["code"] for finding in report["findings"]] == codes
    assert report["verdict"] == ("findings" if codes else "clean")
    assert {finding["num_parameters"] for finding in report["findings"]} == ({8} if codes else set())
