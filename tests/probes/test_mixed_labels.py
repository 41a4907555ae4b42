"""Losses that compare the same logits and share out one weight (mixup, CutMix) are one loss with mixed labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

CLASSES, ROWS, PASSES, STEPS = 5, 8, 3, 3
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A pass's loss from its logits, the labels, others in their place, and a number from 0 to 1 for each row."""


def mixup(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    lam = float(drawn[0])
    return lam * F.cross_entropy(logits, labels) + (1 - lam) * F.cross_entropy(logits, others)


def smoothed(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    lam, criterion = float(drawn[0]), nn.CrossEntropyLoss(label_smoothing=0.1)
    mixed: Tensor = lam * criterion(logits, labels) + (1 - lam) * criterion(logits.float(), others)
    return mixed


def by_row(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    first, second = (F.cross_entropy(logits, of, reduction="none") for of in (labels, others))
    return (drawn * first + (1 - drawn) * second).mean()


def by_hand(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    logs, lam = F.log_softmax(logits, -1), float(drawn[0])
    first, second = (-logs.gather(1, of[:, None]).mean() for of in (labels, others))
    return lam * first + (1 - lam) * second


def in_some_passes(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    return mixup(logits, labels, others, drawn) if drawn[1] < 0.5 else F.cross_entropy(logits, labels)


def not_mixed_at_last(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    """What CutMix leaves where it cuts nothing out."""
    return mixup(logits, labels, others, drawn.round() if drawn[0] > 0.5 else drawn)


def with_one_number(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    return mixup(logits, labels, others, torch.full_like(drawn, 0.7))


FORMS = [mixup, smoothed, by_row, by_hand, in_some_passes, not_mixed_at_last, with_one_number]


def auxiliary(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, others)


def weighed_apart(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    first, second = (F.cross_entropy(logits, of, reduction="none") for of in (labels, others))
    return (drawn / drawn.mean() * first).mean() + (drawn.flip(0) / drawn.mean() * second).mean()


def two_views(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    """One of them of other rows than the other."""
    return 0.7 * F.cross_entropy(logits[::2], labels[::2]) + 0.3 * F.cross_entropy(logits[1::2], labels[1::2])


def rows_and_columns(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    """Each sample's similarity with each other one, both ways."""
    table, own = logits @ logits.T, torch.arange(ROWS)
    return (F.cross_entropy(table, own) + F.cross_entropy(table.T, own)) / 2


def by_both_dimensions(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    table, own = logits @ logits.T, torch.arange(ROWS)
    ways = [F.nll_loss(F.log_softmax(table, dim), own) for dim in (0, 1)]
    return sum(ways, torch.zeros(())) / 2


NOT_MIXED = [auxiliary, weighed_apart, two_views, rows_and_columns, by_both_dimensions]


def trained(run_dir: Path, form: Form, divisor: float = PASSES) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses() -> Iterator[Tensor]:
        for _ in range(PASSES):
            labels = torch.randint(0, CLASSES, (ROWS,))
            yield form(model(torch.randn(ROWS, 6)), labels, labels[torch.randperm(ROWS)], torch.rand(ROWS))

    with attach(run_dir):
        for _ in range(STEPS):
            optimizer.zero_grad()
            for loss in losses():
                (loss / divisor).backward()
            optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("form", FORMS)
def test_mixed_labels_weigh_as_much_as_the_pass(tmp_path: Path, form: Form) -> None:
    report = trained(tmp_path / "run", form)
    assert (report.verdict, report.reasons) == ("clean", [])
    told = [remark for remark in report.coverage.notes if "taken for one loss with mixed labels" in remark]
    assert "2 losses of one pass compare the same logits" in told[0]
    assert told[0].startswith("steps 1 and 2: ") == (form is in_some_passes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("divisor", "factor"), [(1, "accumulation_steps"), (PASSES**2, "1/accumulation_steps")])
def test_a_division_that_lacks_or_comes_twice_is_found(tmp_path: Path, form: Form, divisor: float, factor: str) -> None:
    report = trained(tmp_path / "run", form, divisor)
    assert [(one.code, one.factor and one.factor.expression) for one in report.findings] == [("GS303", factor)]


@pytest.mark.parametrize("form", NOT_MIXED)
def test_losses_that_share_out_no_weight_are_none_with_mixed_labels(tmp_path: Path, form: Form) -> None:
    report = trained(tmp_path / "run", form)
    assert report.findings == []
    assert not any("mixed labels" in remark for remark in report.coverage.notes)


def of_two_lines(logits: Tensor, labels: Tensor, others: Tensor, drawn: Tensor) -> Tensor:
    if drawn[1] < 0.5:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, others)


def test_what_losses_of_two_lines_lack_alike_is_told_once(tmp_path: Path) -> None:
    report = trained(tmp_path / "run", of_two_lines, 1)
    assert [(one.code, one.pattern, one.steps) for one in report.findings] == [
        ("GS303", "every contribution x 3", list(range(STEPS)))
    ]
