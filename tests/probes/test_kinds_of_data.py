"""A discriminator that is trained by a cross-entropy goes backward once for each kind of data, by design."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.label_hashes import one_class, tell_no_batch
from gradcheck_dist.trace.run import read_run

ROWS, STEPS = 6, 2


def labels_of(kind: int) -> Tensor:
    return torch.full((ROWS,), kind)


def trained(run_dir: Path, passes: list[Tensor], factor: float = 1.0) -> Report:
    """Steps of one pass for each of these labels, each loss times a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for _ in range(STEPS):
            optimizer.zero_grad()
            for labels in passes:
                (factor * F.cross_entropy(model(torch.randn(len(labels), 6)), labels)).backward()
            optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("kinds", [(0, 1), (1, 0, 0), (0, 1, 2)])
def test_kinds_of_data_that_add_up_accuse_nobody(tmp_path: Path, kinds: tuple[int, ...]) -> None:
    report = trained(tmp_path, [labels_of(kind) for kind in kinds])
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "of one class" in report.reasons[0]
    assert "mark_loss" in report.next_step


def test_kinds_beside_the_classes_of_what_is_given_accuse_nobody(tmp_path: Path) -> None:
    """Real and generated data, told by a cross-entropy of two classes, and each with classes of its own (AC-GAN)."""
    torch.manual_seed(0)
    body, classes, kinds = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([*body.parameters(), *classes.parameters(), *kinds.parameters()], lr=0.1)
    with attach(tmp_path):
        for _ in range(STEPS):
            optimizer.zero_grad()
            for kind in (0, 1):
                hidden = torch.tanh(body(torch.randn(ROWS, 6)))
                told = F.cross_entropy(kinds(hidden), labels_of(kind))
                (told + F.cross_entropy(classes(hidden), torch.randint(0, 3, (ROWS,)))).backward()
            optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "of one class" in report.reasons[0] and "x 2 and x 2" in report.reasons[0]


@pytest.mark.parametrize("lines", [1, 2])
def test_kinds_that_a_binary_term_tells_accuse_nobody(tmp_path: Path, lines: int) -> None:
    """Real and generated data, each with its classes (AC-GAN); on one line it is a loop over parts of a batch."""
    torch.manual_seed(0)
    body, classes, kind = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *classes.parameters(), *kind.parameters()], lr=0.1)

    def loss(of_kind: float) -> Tensor:
        hidden = torch.tanh(body(torch.randn(ROWS, 6)))
        told = F.binary_cross_entropy_with_logits(kind(hidden), torch.full((ROWS, 1), of_kind))
        return told + F.cross_entropy(classes(hidden), torch.randint(0, 3, (ROWS,)))

    with attach(tmp_path):
        for _ in range(STEPS):
            optimizer.zero_grad()
            if lines == 1:
                for of_kind in (1.0, 0.0):
                    loss(of_kind).backward()
            else:
                loss(1.0).backward()
                loss(0.0).backward()
            optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert [finding.code for finding in report.findings] == ["GS303"] * (lines == 1)
    assert lines == 1 or "a line of its own" in report.reasons[0]


def test_their_mean_is_right(tmp_path: Path) -> None:
    assert trained(tmp_path, [labels_of(0), labels_of(1)], 0.5).verdict == "clean"


@pytest.mark.parametrize(
    "passes",
    [
        [labels_of(1), labels_of(1)],  # one kind alone
        [labels_of(0), torch.tensor([0, 1, 1, 0, 2, 1])],
        [torch.tensor([0]), torch.tensor([1])],  # a label is of one class, whatever it is
    ],
)
def test_parts_of_a_batch_that_nobody_divides_are_found(tmp_path: Path, passes: list[Tensor]) -> None:
    (finding,) = trained(tmp_path, passes).findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(len(passes)))


def test_labels_of_one_class_tell_no_batch() -> None:
    def checksum(*labels: int) -> int:
        return zlib.crc32(torch.tensor(labels).numpy().tobytes())

    assert one_class(3, checksum(2, 2, 2)) == 2
    assert one_class(3, checksum(2, 2, 1)) is None
    assert one_class(1, checksum(2)) is None
    assert tell_no_batch(3, checksum(1, 1, 1))
    assert not tell_no_batch(3, checksum(1, 2, 1))


def replayed(run_dir: Path, factor: float) -> Report:
    """Steps of a batch and one that is replayed, each loss on a line of its own and times a factor."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for _ in range(STEPS):
            batch, old = (torch.randint(0, 3, (ROWS,)) for _ in range(2))
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(torch.randn(ROWS, 6)), batch)).backward()
            (factor * F.cross_entropy(model(torch.randn(ROWS, 6)), old)).backward()
            optimizer.step()
    return diagnose(read_run(run_dir))


def test_a_batch_and_one_that_is_replayed_accuse_nobody(tmp_path: Path) -> None:
    report = replayed(tmp_path / "sum", 1.0)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "differentiated one by one" in report.reasons[0]
    assert replayed(tmp_path / "mean", 0.5).verdict == "clean"
