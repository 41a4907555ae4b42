"""Accumulated gradients that are divided behind every pass by the tokens of that pass, as it is done by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

WIDTH, CLASSES, STEPS = 6, 5, 3


def trained(run: Path, when: str, counts: tuple[int, ...], *, halves: bool = True) -> Report:
    """`counts`: tokens of each pass, other ones in each step. `when`: "each pass", "last pass", "last pass, behind a
    norm" or "once", by all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run, steps=range(STEPS)):
        for step in range(STEPS):
            sizes = [count + (step * place) % 3 for place, count in enumerate(counts, 1)]
            for place, size in enumerate(sizes, 1):
                loss = F.cross_entropy(
                    model(torch.randn(size, WIDTH)), torch.randint(CLASSES, (size,)), reduction="sum"
                )
                (loss / len(sizes) if halves else loss).backward()
                last = place == len(sizes)
                if last and "norm" in when:
                    norms = [param.grad.norm() for param in model.parameters() if param.grad is not None]
                    assert len(norms) == 4
                if when == "each pass" or last:
                    by = sum(sizes) if when == "once" else size
                    for param in model.parameters():
                        assert param.grad is not None
                        param.grad.mul_(1 / by)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


@pytest.mark.parametrize("counts", [(13, 7), (12, 17), (13, 7, 11), (9, 9)])
def test_a_division_behind_each_pass_is_found_at_its_line(counts: tuple[int, ...], tmp_path: Path) -> None:
    report = trained(tmp_path / "run", "each pass", counts)
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("GS000", "error")
    assert "inverse of the tokens of the pass" in finding.explanation
    event = finding.first_event
    assert event is not None and event.line is not None
    assert "mul_(1 / by)" in Path(str(event.file)).read_text().splitlines()[event.line - 1]


def test_a_division_by_the_last_pass_alone_is_found(tmp_path: Path) -> None:
    findings = trained(tmp_path / "run", "last pass", (13, 7), halves=False).findings
    assert len(findings) == 1


def test_a_division_by_the_last_pass_alone_is_told_from_the_loss_where_norms_part_them(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path / "run", "last pass, behind a norm", (13, 7, 11), halves=False).findings
    assert (finding.code, finding.severity) == ("GS305", "error")
    assert finding.factor.observed == pytest.approx(31 / 11)
    assert "those of the others are not counted" in finding.explanation


def test_a_division_by_the_tokens_of_all_passes_is_clean(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", "once", (13, 7), halves=False).verdict == "clean"


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_a_division_by_passes_behind_each_of_them_is_not_taken_for_one_by_tokens(
    num_tokens: int, tmp_path: Path
) -> None:
    """Also where a pass has as many tokens as a step has passes."""
    model = nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run", steps=range(STEPS)):
        for _ in range(STEPS):
            for _ in range(2):
                labels = torch.randint(CLASSES, (num_tokens,))
                F.cross_entropy(model(torch.randn(num_tokens, WIDTH)), labels).backward()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.div_(2)
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.factor.expression) == ("GS000", "accumulation_steps^-(K-1-k)")
    assert "tokens" not in finding.explanation
    assert finding.fix.startswith("Let it act once in a step")
