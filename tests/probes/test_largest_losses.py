"""Means over the largest losses of a pass, also where fewer of these have a label than are taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged
from probe_workers import Net
from torch import Tensor

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach

TAKEN = 8
LABELLED = ((12, 9), (5, 10))
"""Tokens with a label by pass, in two steps."""


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)


def picked_by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return -picked * (labels >= 0)


HARDEST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "topk": lambda logits, labels: cross_entropies(logits, labels).flatten().topk(TAKEN).values.mean(),
    "sum": lambda logits, labels: cross_entropies(logits, labels).flatten().topk(TAKEN).values.sum() / TAKEN,
    "sort": lambda logits, labels: cross_entropies(logits, labels).flatten().sort(descending=True)[0][:TAKEN].mean(),
    "by hand": lambda logits, labels: picked_by_hand(logits, labels).flatten().topk(TAKEN).values.mean(),
}


def train(folder: Path, hardest: Callable[[Tensor, Tensor], Tensor], *, divisor: float, louder: float = 1.0) -> Report:
    """`louder`: the first pass is multiplied by it."""
    generator = torch.Generator().manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run", objective="microbatch-mean"):
        for counts in LABELLED:
            for k, count in enumerate(counts):
                tokens, labels = torch.randint(0, 20, (2, 2, 8), generator=generator)
                labels.view(-1)[count:] = -100
                loss = hardest(model(tokens), labels) / divisor
                (loss * (louder if k == 0 else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder / "run")


@pytest.mark.parametrize("how", HARDEST)
def test_elements_without_a_label_that_fill_such_a_mean_up_accuse_nobody(tmp_path: Path, how: str) -> None:
    report = train(tmp_path, HARDEST[how], divisor=2)
    assert (report.verdict, report.findings) == ("clean", [])
    assert any("of the 8 largest losses of a pass, 5 have a label" in note for note in report.coverage.notes)


@pytest.mark.parametrize("how", HARDEST)
def test_a_missing_division_of_such_means_is_found_in_all_steps_alike(tmp_path: Path, how: str) -> None:
    (finding,) = train(tmp_path, HARDEST[how], divisor=1).findings
    assert (finding.code, finding.factor.exact, finding.steps) == ("GS303", "2", [0, 1])


def test_a_pass_that_is_louder_is_told_by_its_own_factor(tmp_path: Path) -> None:
    (finding,) = train(tmp_path, HARDEST["topk"], divisor=2, louder=3).findings
    assert (finding.factor.observed, finding.steps) == (pytest.approx(3), [0, 1])


def test_a_mean_over_all_elements_is_still_taken_for_padding(tmp_path: Path) -> None:
    report = train(tmp_path, lambda logits, labels: cross_entropies(logits, labels).mean(), divisor=2)
    assert report.verdict == "findings"
