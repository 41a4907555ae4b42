"""A network and parts of it that go backward on one batch: their losses add up by design."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_process import judged
from parts_on_ranks_workers import Sliceable
from torch import Tensor, optim
from torch.nn import functional as F

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run


def soft_loss(outputs: Tensor, wanted: Tensor) -> Tensor:
    return -(wanted * F.log_softmax(outputs, -1)).sum(-1).mean()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_network_and_its_parts_accuse_nobody(num_parts: int, tmp_path: Path) -> None:
    """The whole learns smoothed labels, its parts what it predicted (the sandwich rule of slimmable networks)."""
    torch.manual_seed(0)
    model = Sliceable()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            x, labels = torch.randn(5, 8), F.one_hot(torch.randint(0, 6, (5,)), 6)
            optimizer.zero_grad()
            model.width = 24
            outputs = model(x)
            soft_loss(outputs, 0.9 * labels + 0.1 / 6).backward()  # type: ignore[no-untyped-call]
            for part in range(num_parts):
                model.width = 16 - 4 * part
                soft_loss(model(x), outputs.detach().softmax(-1)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("are differentiated one by one" in reason for reason in report.reasons)


def test_passes_of_one_line_that_nobody_divides_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sliceable()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                labels = F.one_hot(torch.randint(0, 6, (5,)), 6)
                soft_loss(model(torch.randn(5, 8)), 0.9 * labels + 0.1 / 6).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    (finding,) = judged(tmp_path).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize("divided", [False, True])
def test_parts_that_all_learn_one_batchs_labels_from_one_line_accuse_nobody(*, divided: bool, tmp_path: Path) -> None:
    """Once-for-all: by design, the losses of parts of a network are added up."""
    torch.manual_seed(0)
    model = Sliceable()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            x, labels = torch.randn(5, 8), torch.randint(0, 6, (5,))
            optimizer.zero_grad()
            for model.width in (24, 16, 8):
                loss = F.cross_entropy(model(x), labels)
                (loss / 3 if divided else loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("clean" if divided else "undetermined", [])
    assert divided or any("on one batch" in reason for reason in report.reasons)
    early: list[Report] = []
    assert diagnose_run(tmp_path, first=True).verdict == report.verdict, "whoever wants the first finding waits for it"
    diagnose_run(tmp_path, early=early.append)
    assert not early


def test_a_batch_that_each_pass_repeats_unchanged_is_accumulated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sliceable()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x, labels = torch.randn(5, 8), torch.randint(0, 6, (5,))
    with attach(tmp_path):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                F.cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    (finding,) = judged(tmp_path).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")
