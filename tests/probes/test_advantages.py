"""Policy gradients: log-probabilities of tokens times advantages, of sequences and of batches of one."""

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

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Of log-probabilities and a mask, (sequences, tokens), of advantages, (sequences, 1), and of what divides them."""
LENGTH, PASSES = 12, 3


def of_tokens(logp: Tensor, mask: Tensor, advantages: Tensor, count: float) -> Tensor:
    return (-logp * advantages * mask).sum() / count


def of_summed_tokens(logp: Tensor, mask: Tensor, advantages: Tensor, count: float) -> Tensor:
    return -((logp * mask).sum(1) * advantages[:, 0]).sum() / count


def of_means_of_sequences(logp: Tensor, mask: Tensor, advantages: Tensor, count: float) -> Tensor:
    return -((logp * advantages * mask).sum(1) / mask.sum(1)).sum() / count


def of_means_times_advantages(logp: Tensor, mask: Tensor, advantages: Tensor, count: float) -> Tensor:
    return -(((logp * mask).sum(1) / mask.sum(1)) * advantages[:, 0]).mean() * len(logp) / count


def of_one_number(logp: Tensor, mask: Tensor, advantages: Tensor, count: float) -> Tensor:
    return -(logp * mask).sum() * float(advantages.sum()) / count


BY_TOKENS, BY_SEQUENCES = "tokens", "sequences"
FORMS: list[tuple[Loss, str]] = [
    (of_tokens, BY_TOKENS),
    (of_summed_tokens, BY_TOKENS),
    (of_summed_tokens, BY_SEQUENCES),
    (of_means_of_sequences, BY_SEQUENCES),
    (of_means_times_advantages, BY_SEQUENCES),
]


def train(folder: Path, loss: Loss, by: str, *, rows: int, wrong: str = "", signs: tuple[int, ...] = (1, -1)) -> Report:
    """Three steps of three passes over `rows` sequences of unequal lengths; passes, in turn, have advantages of these
    signs. `wrong`: "emptied" in the loop, or each pass divided by "its own" count alone."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for step in range(3):
            lengths = torch.randint(1, LENGTH + 1, (PASSES, rows, 1))
            masks = (torch.arange(LENGTH) < lengths).float()
            total = float(masks.sum()) if by == BY_TOKENS else PASSES * rows
            for k, mask in enumerate(masks):
                if wrong == "emptied":
                    optimizer.zero_grad()
                tokens, labels = torch.randint(20, (2, rows, LENGTH))
                advantages = (torch.rand(rows, 1) + 0.2) * signs[(step + k) % len(signs)]
                logp = torch.log_softmax(model(tokens), -1).gather(-1, labels[..., None])[..., 0]
                own = float(mask.sum()) if by == BY_TOKENS else rows
                loss(logp, mask, advantages, own if wrong == "its own" else total).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("loss", "by"), FORMS)
def test_what_multiplies_all_tokens_or_sequences_beside_their_advantages_is_judged(
    tmp_path: Path, loss: Loss, by: str, rows: int
) -> None:
    report = train(tmp_path, loss, by, rows=rows)
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("signs", [(1, -1), (-1,), (1, 1, 1, 1, -1)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_number_below_zero_before_a_loss_is_no_wrong_normaliser(
    tmp_path: Path, rows: int, signs: tuple[int, ...]
) -> None:
    report = train(tmp_path, of_one_number, BY_TOKENS, rows=rows, signs=signs)
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("loss", "by"), [*FORMS, (of_one_number, BY_TOKENS)])
def test_passes_that_are_emptied_are_found(tmp_path: Path, loss: Loss, by: str, rows: int) -> None:
    report = train(tmp_path, loss, by, rows=rows, wrong="emptied")
    assert [finding.code for finding in report.findings] == ["GS401"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("loss", "by"), FORMS)
def test_a_division_by_its_own_count_alone_is_not_clean(tmp_path: Path, loss: Loss, by: str, rows: int) -> None:
    assert train(tmp_path, loss, by, rows=rows, wrong="its own").verdict != "clean"


@pytest.mark.parametrize("as_number", [False, True])
def test_weights_of_batches_of_one_accuse_nobody(tmp_path: Path, as_number: bool) -> None:
    """Importances above zero: as tensors they are seen, numbers of the program's own are told."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path):
        for _ in range(3):
            for weight in torch.rand(PASSES, 1) + 0.3:
                tokens, labels = torch.randint(20, (2, 1, LENGTH))
                losses = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
                loss = losses.mean() * float(weight) if as_number else (losses.mean(1) * weight).mean()
                (loss / PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined" if as_number else "clean", [])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("coefficient", [None, 0.5])
def test_a_mask_that_is_averaged_over_all_positions_is_found(
    tmp_path: Path, rows: int, coefficient: float | None
) -> None:
    """Masks are no weights of data, nor is a coefficient that is a tensor of one element."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path):
        for lengths in torch.randint(1, LENGTH, (PASSES, rows, 1)):
            tokens, labels = torch.randint(20, (2, rows, LENGTH))
            losses = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
            losses = losses if coefficient is None else losses * torch.tensor([coefficient])
            ((losses * (torch.arange(LENGTH) < lengths)).mean() / PASSES).backward()
        optimizer.step()
    (finding,) = judged(tmp_path).findings
    assert finding.code == "GS303"


def test_wrong_lengths_of_sequences_are_no_weights_of_the_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path):
        for lengths in torch.randint(2, LENGTH, (PASSES, 3, 1)):
            tokens, labels = torch.randint(20, (2, 3, LENGTH))
            losses = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
            mask = (torch.arange(LENGTH) < lengths).float()
            (((losses * mask).sum(1) / (mask.sum(1) - 1)).mean() / PASSES).backward()
        optimizer.step()
    assert judged(tmp_path).verdict != "clean"


@pytest.mark.parametrize("rows", [1, 4])
def test_a_coefficient_of_one_element_is_a_number_before_a_mean(tmp_path: Path, rows: int) -> None:
    """Means that count nothing: they may have coefficients, and no division is missing."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path):
        for _ in range(PASSES):
            squares = (model(torch.randn(rows, 6)) - torch.randn(rows, 5)) ** 2
            (squares.mean(1) * torch.tensor([0.5])).mean().backward()
        optimizer.step()
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
