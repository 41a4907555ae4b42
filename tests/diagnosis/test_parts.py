"""A contrastive loss over a large batch of which each pass differentiates a part: its samples count once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

STEPS, PARTS, SAMPLES = 3, 3, 4


def contrast(one: Tensor, other: Tensor) -> Tensor:
    logits = 5 * F.normalize(one) @ F.normalize(other).T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def train(
    folder: Path, *, divisor: float = 1.0, halved: bool = False, parts: bool = True, columns: bool = False
) -> Report:
    """Two towers; features of all parts but one come without gradients. `parts` False: each is a batch of its own."""
    torch.manual_seed(0)
    towers = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)
    with attach(folder, steps=range(STEPS - columns), every_step=columns):
        for _ in range(STEPS):
            batch = torch.randn(PARTS, 2, SAMPLES, 6)
            with torch.no_grad():
                kept = [[tower(inputs) for tower, inputs in zip(towers, part, strict=True)] for part in batch]
            for k, part in enumerate(batch):
                features = [tower(inputs) for tower, inputs in zip(towers, part, strict=True)]
                if parts:
                    together = [*kept[:k], features, *kept[k + 1 :]]
                    features = [torch.cat(of_tower) for of_tower in zip(*together, strict=True)]
                (contrast(*features) / divisor).backward()
                for param in towers.parameters() if halved else ():
                    assert param.grad is not None
                    param.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(folder) if columns else diagnose(read_run(folder))


def test_parts_of_one_loss_count_once(tmp_path: Path) -> None:
    report = train(tmp_path)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    assert any("parts of one loss" in remark for remark in report.coverage.notes)


def test_batches_of_their_own_with_the_same_labels_are_no_parts(tmp_path: Path) -> None:
    report = train(tmp_path, parts=False, divisor=PARTS)
    assert (report.verdict, report.coverage.problems + report.coverage.notes) == ("clean", []), report.reasons
    [finding] = train(tmp_path / "summed", parts=False).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def test_parts_that_are_divided_as_batches_are_told(tmp_path: Path) -> None:
    report = train(tmp_path, divisor=PARTS)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("all weigh 1/3 of what they should" in reason for reason in report.reasons), report.reasons


def test_what_is_done_to_parts_on_their_way_is_found(tmp_path: Path) -> None:
    [finding] = train(tmp_path, halved=True).findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(0.5))


def test_steps_without_samples_accuse_no_parts(tmp_path: Path) -> None:
    report = train(tmp_path, columns=True)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("several passes have one loss" in reason for reason in report.reasons), report.reasons


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_gradients_of_features_that_are_cached_accuse_nobody(tmp_path: Path, divisor: float) -> None:
    """GradCache (Gao et al. 2021): the loss is differentiated up to detached features, and these gradients are then
    taken on by one pass a part. What a coefficient before the second passes is meant for is not known."""
    torch.manual_seed(0)
    towers = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
    optimizer = torch.optim.SGD(towers.parameters(), lr=0.1)
    with attach(tmp_path, steps=range(STEPS)):
        for _ in range(STEPS):
            batch = torch.randn(PARTS, 2, SAMPLES, 6)
            with torch.no_grad():
                kept = [[tower(inputs) for tower, inputs in zip(towers, part, strict=True)] for part in batch]
            leaves = [torch.cat(of_tower).requires_grad_() for of_tower in zip(*kept, strict=True)]
            contrast(*leaves).backward()
            gradients = [leaf.grad.chunk(PARTS) for leaf in leaves if leaf.grad is not None]
            for part, *cached in zip(batch, *gradients, strict=True):
                features = [tower(inputs) for tower, inputs in zip(towers, part, strict=True)]
                sum((one * grad / divisor).sum() for one, grad in zip(features, cached, strict=True)).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", []), report.reasons
