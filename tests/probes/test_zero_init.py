"""Layers that begin at zero: in the first step, what lies before them has no gradient."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run


def test_a_finding_concerns_the_parameters_of_all_its_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))
    nn.init.zeros_(model[2].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(3):
            for _ in range(3):  # means over microbatches, added up
                nn.functional.cross_entropy(model(torch.randn(4, 16)), torch.randint(0, 8, (4,))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.steps, finding.factor.expression) == ([0, 1, 2], "accumulation_steps")
    assert finding.num_parameters == len(list(model.parameters()))
