"""Projected gradient descent keeps gradients aside, empties `.grad` for its steps, and puts them back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

PASSES, STEPS, ATTACKS = 3, 2, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(30, 8), nn.Linear(8, 16), nn.Linear(16, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens)))).flatten(0, 1)


def attack(model: Net, tokens: Tensor, labels: Tensor, divided_by: int, *, puts_back: bool) -> None:
    """The passes on moved embeddings, the last of which trains."""
    table = model.embedding.weight
    kept = [param.grad.clone() for param in model.parameters()]
    before = table.data.clone()
    for at in range(ATTACKS):
        table.data.add_(0.3 * table.grad / table.grad.norm())
        if at < ATTACKS - 1 or not puts_back:
            model.zero_grad()
        else:
            for param, grad in zip(model.parameters(), kept, strict=True):
                param.grad = grad.clone()
        (F.cross_entropy(model(tokens), labels) / divided_by).backward()
    table.data = before


def trained(run_dir: Path, *, puts_back: bool = True, divided_by: int = PASSES) -> Report:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with attach(run_dir):
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(PASSES):
                tokens, labels = torch.randint(0, 30, (5, 6)), torch.randint(0, 9, (30,))
                (F.cross_entropy(model(tokens), labels) / divided_by).backward()
                attack(model, tokens, labels, divided_by, puts_back=puts_back)
            optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize(("divided_by", "told"), [(PASSES, "x 1 and x 1"), (1, "x 3 and x 3")])
def test_gradients_that_come_back_were_not_thrown_away(tmp_path: Path, divided_by: int, told: str) -> None:
    report = trained(tmp_path, divided_by=divided_by)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert f"differentiated one by one, and weigh {told} of a mean over their own tokens" in report.reasons[0]
    assert ("as many as each has passes" in report.reasons[0]) == (divided_by == 1)


def test_without_them_earlier_microbatches_are_lost(tmp_path: Path) -> None:
    """A batch that is evaluated four times, and lost each time, is lost once."""
    (finding,) = trained(tmp_path, puts_back=False).findings
    assert finding.code == "GS401"
