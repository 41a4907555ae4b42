"""Steps all of whose losses are multiplied by zero: a guard's in one step, a fault in all of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net, batch

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

STEPS = 3


@pytest.mark.parametrize(("empty", "codes"), [([1], []), (range(STEPS), ["GS000"])])
def test_a_step_without_any_loss_is_open_where_others_have_some(
    tmp_path: Path, empty: Collection[int], codes: list[str]
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            tokens, labels = batch(0, step)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            (loss * (0.0 if step in empty else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == codes
    assert any("multiplied by zero" in reason for reason in report.reasons) == (not codes)
