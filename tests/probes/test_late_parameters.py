"""Parameters that are made, trained or filled late: lazy ones, frozen ones, sparse gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

VOCAB, DIM, STEPS = 11, 8, 3


class Net(nn.Module):
    def __init__(self, *, lazy: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, sparse=sparse)
        self.head = nn.LazyLinear(VOCAB) if lazy else nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))  # type: ignore[no-any-return]


def trained(run: Path, kind: str, factor: float = 1.0) -> Report:
    torch.manual_seed(0)
    with attach(run, steps=range(STEPS)):
        model = Net(lazy=kind == "lazy", sparse=kind == "sparse")
        if kind == "lazy":
            model(torch.arange(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            model.embed.weight.requires_grad_(kind != "frozen" or step > 0)
            tokens = torch.randint(VOCAB, (24,))
            nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
            if model.embed.weight.grad is not None:
                model.embed.weight.grad = model.embed.weight.grad * factor
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


@pytest.mark.parametrize("kind", ["lazy", "frozen", "sparse"])
def test_what_comes_late_is_judged_like_everything_else(kind: str, tmp_path: Path) -> None:
    right = trained(tmp_path / "right", kind)
    assert (right.verdict, right.coverage.unidentifiable) == ("clean", [])
    (finding,) = trained(tmp_path / "wrong", kind, factor=0.25).findings
    assert (finding.code, finding.factor.exact, finding.num_parameters) == ("GS000", "1/4", 1)
