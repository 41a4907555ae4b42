"""One length for each sequence, by which sums over tokens are divided, in every step: it may be meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged
from probe_workers import Net

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach

ROW = 10
"""Labels of a row; sequences have some of them, and one of every step all."""
LENGTHS = ((10, 3), (2, 10, 5), (10, 10))
SHORTER = ((7, 3), (2, 7, 5), (7, 6))
"""No sequence has a label in every place, as behind prompts."""


def trained(
    folder: Path,
    length: int,
    *,
    objective: str | None = None,
    steps: int = 3,
    equal: bool = False,
    shorter: bool = False,
    rows: tuple[int, ...] = (ROW, ROW, ROW),
) -> Report:
    """Sums over tokens, divided by a length for each sequence."""
    generator = torch.Generator().manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run", objective=objective):
        for lengths, width in zip((SHORTER if shorter else LENGTHS)[:steps], rows, strict=False):
            lengths = (ROW,) * len(lengths) if equal else lengths
            tokens, labels = torch.randint(0, 20, (2, len(lengths), width), generator=generator)
            for row, num in enumerate(lengths):
                labels[row, num:] = -100
            losses = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none", ignore_index=-100)
            (losses.sum() / (length * len(lengths))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder / "run")


def test_a_length_that_is_no_row_s_is_left_open_and_told(tmp_path: Path) -> None:
    report = trained(tmp_path, 16)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "divided by 16 for each sequence, in every step" in report.reasons[0]
    assert "mark_loss(loss_sum / length, num_sequences)" in report.reasons[0]


def test_rows_that_are_not_as_long_in_every_step_are_no_padding_that_was_counted(tmp_path: Path) -> None:
    report = trained(tmp_path, 16, shorter=True, rows=(8, 12, 16))
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize(
    ("length", "how"),
    [
        (ROW, {}),  # padding
        (ROW, {"shorter": True}),
        (2 * ROW, {"shorter": True}),
        (ROW + 1, {}),  # labels before their shift
        (2 * ROW, {}),  # padding, counted by two ranks
        (16, {"objective": "global-token-mean"}),
        (16, {"steps": 1}),
        (16, {"equal": True}),  # any constant would do this
    ],
)
def test_what_tells_of_no_such_length_is_found(tmp_path: Path, length: int, how: dict[str, object]) -> None:
    (finding,) = trained(tmp_path, length, **how).findings  # type: ignore[arg-type]
    assert finding.code == "GS303"
