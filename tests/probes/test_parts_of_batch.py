"""Means over parts of one batch that one pass adds up: of chunks, of microbatches; and of heads, rows and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.steps.open_steps import PARTS
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

VOCABULARY, ROWS, LENGTH = 11, 4, 8
Part = tuple[Tensor, Tensor]
"""Logits and labels."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh())
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.other = nn.Linear(8, VOCABULARY)


Form = Callable[[Model, Tensor, Tensor], Iterable[Part]]


def chunks(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    """Of all rows' tokens, before the head."""
    hidden = model.body(ids).chunk(2, dim=1)
    return [(model.head(part), of) for part, of in zip(hidden, labels.chunk(2, dim=1), strict=True)]


def chunks_of_logits(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    return zip(model.head(model.body(ids)).split(4, dim=-2), labels.split(4, dim=-1), strict=True)


def chunks_of_one_row(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    return chunks(model, ids[:1], labels[:1])


def groups_of_rows(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    return zip(model.head(model.body(ids)).chunk(2), labels.chunk(2), strict=True)


def microbatches(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    return [
        (model.other(model.body(part)), of) for part, of in zip(ids.chunk(2), labels.chunk(2), strict=True)
    ]  # with a bias


def chunks_laid_flat(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    """Of the tokens of all rows, the last chunk shorter."""
    hidden = model.body(ids).flatten(0, 1)
    return zip(map(model.head, hidden.split(12)), labels.flatten().split(12), strict=True)


def slices_laid_flat(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    hidden, of = model.body(ids).flatten(0, 1), labels.flatten()
    return [(model.head(hidden[begin : begin + 9]), of[begin : begin + 9]) for begin in range(0, len(of), 9)]


def rows(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    return zip(model.head(model.body(ids)).split(1), labels.split(1), strict=True)


def rows_one_by_one(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    return [(model.head(model.body(ids[row])), labels[row]) for row in range(ROWS)]


def rows_laid_flat(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    hidden = model.body(ids).flatten(0, 1)
    return zip(map(model.head, hidden.split(LENGTH)), labels.flatten().split(LENGTH), strict=True)


def shifted_rows(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    """Microbatches of one row, all but their last token."""
    return [(model.head(model.body(ids[row : row + 1]))[:, :-1], labels[row : row + 1, 1:]) for row in range(ROWS)]


def slices(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    """Of one packed row, each of a length of its own."""
    hidden, parts = model.body(ids[:1]), (slice(0, 3), slice(3, LENGTH))
    return [(model.head(hidden[:, part]), labels[:1, part]) for part in parts]


def heads(model: Model, ids: Tensor, labels: Tensor) -> Iterable[Part]:
    """Two, of which the second looks one token further."""
    hidden = model.body(ids)
    return [(model.head(hidden), labels), (model.other(hidden[:, :-1]), labels[:, 1:])]


PARTS_OF_ONE = [
    chunks,
    chunks_of_logits,
    chunks_of_one_row,
    chunks_laid_flat,
    slices_laid_flat,
    groups_of_rows,
    microbatches,
]
OF_THEIR_OWN = [rows, rows_one_by_one, rows_laid_flat, shifted_rows, slices, heads]


def trained(
    run_dir: Path, form: Form, *, sums: bool = False, objective: str | None = None, times: float = 1.0
) -> Report:
    """One step over two batches of rows that are padded by unequal numbers of ignored labels: means of parts, or their
    `sums` over all tokens, `times` too large."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH))
    labels = ids.roll(1, -1)
    for row, padding in enumerate((1, 0, 4, 3)):
        labels[:, row, LENGTH - padding :] = -100
    with attach(run_dir, objective=objective):
        for batch in zip(ids, labels, strict=True):
            parts = [(logits.flatten(0, -2), of.flatten()) for logits, of in form(model, *batch)]
            losses = [F.cross_entropy(*part, reduction="sum" if sums else "mean") for part in parts]
            num = 2 * (sum(int((of >= 0).sum()) for _, of in parts) if sums else len(parts))
            (reduce(torch.add, losses) / (num / times)).backward()
        optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("form", PARTS_OF_ONE)
def test_means_over_parts_of_one_batch_leave_the_verdict_open(tmp_path: Path, form: Form) -> None:
    report = trained(tmp_path / "run", form)
    assert (report.verdict, report.findings, report.reasons[0]) == ("undetermined", [], PARTS)
    assert trained(tmp_path / "meant", form, objective="sequence-mean").verdict == "clean"


@pytest.mark.parametrize("form", PARTS_OF_ONE)
def test_sums_over_parts_that_are_divided_once_are_right(tmp_path: Path, form: Form) -> None:
    report = trained(tmp_path / "run", form, sums=True)
    assert (report.verdict, report.run.objective) == ("clean", "global-token-mean")


@pytest.mark.parametrize("form", PARTS_OF_ONE)
def test_sums_over_parts_that_are_divided_by_too_few_tokens_are_found(tmp_path: Path, form: Form) -> None:
    """As one sum over the whole batch is: no coefficient stands before parts that nothing multiplies."""
    (finding,) = trained(tmp_path / "run", form, sums=True, times=3.7).findings
    assert finding.code == "GS303"
    assert finding.factor.observed == pytest.approx(3.7)


@pytest.mark.parametrize("form", OF_THEIR_OWN)
def test_means_over_rows_or_heads_are_taken_as_they_are(tmp_path: Path, form: Form) -> None:
    report = trained(tmp_path / "run", form)
    assert (report.verdict, report.run.objective) == ("clean", "sequence-mean")
