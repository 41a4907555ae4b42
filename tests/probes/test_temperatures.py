"""Distillation multiplies its divergence by the temperature's square, which is no lacking division."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_process import judged
from probe_workers import Net, batch
from torch import optim
from torch.nn import functional as F

from gradcheck_dist.probes import attach


@pytest.mark.parametrize("where", ["at the loss", "behind"])
@pytest.mark.parametrize(("temperature", "num_passes"), [(2.0, 4), (2.0, 3), (1.0, 3)])
def test_a_temperature_accuses_nobody(temperature: float, num_passes: int, where: str, tmp_path: Path) -> None:
    """Above all where as many passes are divided by as its square is."""
    model, teacher = Net(), Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for step in range(2):
            for k in range(num_passes):
                tokens, _ = batch(step, k)
                wanted = F.softmax(teacher(tokens).detach().flatten(0, 1) / temperature, -1)
                log_probs = F.log_softmax(model(tokens).flatten(0, 1) / temperature, -1)
                loss = F.kl_div(log_probs, wanted, reduction="batchmean") * temperature**2
                (loss / num_passes if where == "at the loss" else loss).backward()  # type: ignore[no-untyped-call]
            for param in model.parameters() if where == "behind" else ():
                assert param.grad is not None
                param.grad = param.grad / num_passes
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert [finding.code for finding in report.findings] == []
    assert report.verdict == ("clean" if temperature == 1 else "undetermined")


def test_a_divergence_that_nobody_divides_by_its_passes_is_found(tmp_path: Path) -> None:
    model, teacher = Net(), Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for step in range(2):
            for k in range(3):
                tokens, _ = batch(step, k)
                wanted = F.softmax(teacher(tokens).detach().flatten(0, 1), -1)
                log_probs = F.log_softmax(model(tokens).flatten(0, 1), -1)
                F.kl_div(log_probs, wanted, reduction="batchmean").backward()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = judged(tmp_path).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize(("num_passes", "divided_by", "code"), [(3, 3, None), (3, 1, None), (3, 0.6, "GS303")])
def test_a_temperature_before_a_contrastive_loss_accuses_nobody(
    num_passes: int, divided_by: float, code: str | None, tmp_path: Path
) -> None:
    """Rows whose labels are 0 to n-1 are divided by a temperature, and their losses multiplied by twice that. Whether
    a division by passes lacks as well is not known; where the number is that of passes, it is none of a temperature."""
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for step in range(2):
            for k in range(num_passes):
                tokens, _ = batch(step, k)
                rows = F.normalize(model(tokens).mean(1), dim=-1)
                others = F.normalize(model(tokens.flip(1)).mean(1), dim=-1).detach()
                losses = F.cross_entropy(rows @ others.T / 0.3, torch.arange(len(rows)), reduction="none") * 0.6
                (losses.mean() / divided_by).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert [finding.code for finding in report.findings] == ([code] if code else [])
    assert report.verdict == ("findings" if code else "undetermined")
