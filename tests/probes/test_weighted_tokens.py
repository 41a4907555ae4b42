"""Tokens and batches with weights of their own, by source or task: nobody is accused where some weigh alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged
from probe_workers import Net, batch
from torch import Tensor

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach

Sources = Sequence[Sequence[float]]
"""One sequence a microbatch: the weights of its two documents."""


def weighted(logits: Tensor, labels: Tensor, weights: Sequence[float]) -> Tensor:
    """The sum of the tokens' losses, each times the weight of its document."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * torch.tensor(weights)[:, None]).sum()


def train(folder: Path, steps: Sequence[Sources], *, lost: bool = False) -> Report:
    """Each step divides by its tokens' weights. `lost`: what the first microbatch gave is thrown away."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for sources in steps:
            data = [batch(0, k) for k in range(len(sources))]
            total = sum(
                float(((labels >= 0) * torch.tensor(weights)[:, None]).sum())
                for (_, labels), weights in zip(data, sources, strict=True)
            )
            for k, ((tokens, labels), weights) in enumerate(zip(data, sources, strict=True)):
                (weighted(model(tokens), labels, weights) / total).backward()
                if lost and k == 0:
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


MIXED, ALIKE = ((1.0, 0.5), (0.5, 2.0)), ((1.0, 1.0), (0.5, 2.0))


@pytest.mark.parametrize("steps", [[MIXED, ALIKE], [MIXED, ((1.0, 1.0), (0.5, 0.5))], [ALIKE, ALIKE]])
def test_documents_that_happen_to_weigh_alike_are_not_accused(tmp_path: Path, steps: Sequence[Sources]) -> None:
    report = train(tmp_path / "run", steps)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("different weights" in reason for reason in report.reasons)


def test_what_is_wrong_behind_weighted_tokens_is_found(tmp_path: Path) -> None:
    report = train(tmp_path / "run", [ALIKE, ALIKE], lost=True)
    assert [finding.code for finding in report.findings] == ["GS401"]


def by_batch(folder: Path, steps: Sequence[Sequence[float]]) -> Report:
    """Each microbatch is of one source, whose weight multiplies its mean."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for weights in steps:
            for k, weight in enumerate(weights):
                tokens, labels = batch(0, k)
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten().clamp_min(0))
                (loss * weight / len(weights)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


def test_batches_with_coefficients_of_their_own_are_not_accused(tmp_path: Path) -> None:
    report = by_batch(tmp_path / "run", [(1.0, 0.5, 1.0), (0.5, 0.5, 1.0), (1.0, 1.0, 1.0)])
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("weigh 1, 2 to one another" in reason for reason in report.reasons)


@pytest.mark.parametrize("steps", [[(0.5, 1.0, 1.0)] * 3, [(0.5, 1.0, 0.5)] * 3, [(1.0, 1.0, 1.0), (0.5, 0.5, 1.0)]])
def test_what_follows_the_accumulation_steps_is_found(tmp_path: Path, steps: Sequence[Sequence[float]]) -> None:
    """The same in each step, or first one number and then the other: no batch's own."""
    report = by_batch(tmp_path / "run", steps)
    assert report.verdict == "findings"
    assert {finding.first_event.kind for finding in report.findings if finding.first_event} == {"loss"}


def test_sums_over_few_sizes_of_batches_have_no_coefficients(tmp_path: Path) -> None:
    """Each pass is the sum over its tokens; what divides them behind the passes divides by these once more."""
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for sizes in ((8, 12, 16, 8), (12, 8, 16, 16), (16, 12, 8, 12)):
            for size in sizes:
                tokens, labels = torch.randint(20, (2, size))
                F.cross_entropy(model(tokens), labels, reduction="sum").backward()
            for param in model.parameters():
                param.grad = param.grad / (len(sizes) * sum(sizes))
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = judged(tmp_path / "run").findings
    assert finding.factor.expression == "1/accumulation_steps"
