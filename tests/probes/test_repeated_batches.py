"""Ranks that add up gradients by hand and were fed one batch, and accumulation steps that are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import judged, record
from probe_workers import batch
from repeated_batch_workers import PARTED, VARIANTS
from torch import nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("runs")
    launch("repeated_batch_workers:train_all", (str(folder),), 2, timeout_s=90)
    return {variant: diagnose_run(folder / variant) for variant in (*VARIANTS, *PARTED)}


def repeated(reports: dict[str, Report], variant: str) -> list[str]:
    return [finding.code for finding in reports[variant].findings if finding.code == "GS701"]


def test_a_batch_that_all_ranks_compute_whole_is_found(reports: dict[str, Report]) -> None:
    (finding,) = reports["one batch"].findings
    assert (finding.code, finding.ranks, finding.pattern) == ("GS701", [0, 1], "ranks 0 and 1 repeat one another")
    assert finding.first_event is not None and finding.first_event.kind == "loss"
    assert "DistributedSampler" in finding.fix


def test_batches_of_ones_own_are_clean(reports: dict[str, Report]) -> None:
    assert (reports["own batches"].verdict, reports["own batches"].findings) == ("clean", [])


@pytest.mark.parametrize("variant", ["one batch, not reduced", "shards of one seed"])
def test_ranks_that_divide_the_work_or_reduce_nothing_share_a_batch(reports: dict[str, Report], variant: str) -> None:
    """Shards that were drawn from one seed have equal gradients, but activations go between them."""
    assert not repeated(reports, variant)


@pytest.mark.parametrize(("variant", "factor"), list(zip(PARTED, (1.0, 3.0, 2.0), strict=True)))
def test_pieces_of_one_batch_share_what_was_added_up_of_them(
    reports: dict[str, Report], variant: str, factor: float
) -> None:
    """What the optimizer reads may as well be a multiple of the last piece, which is like all others."""
    report = reports[variant]
    ratios = [weight.ratio for weight in report.weights]
    assert len(ratios) >= 12 and ratios == pytest.approx([factor] * len(ratios), rel=1e-4)
    assert len(report.findings) == (factor != 1)
    assert all(finding.factor.observed == pytest.approx(factor, rel=1e-4) for finding in report.findings)


@pytest.mark.parametrize(("which", "told"), [([0, 0, 0], True), ([0, 1, 0], False), ([0], False)])
@pytest.mark.parametrize("dropout", [False, True])
def test_accumulation_steps_of_one_batch_are_told(
    *, which: list[int], told: bool, dropout: bool, tmp_path: Path
) -> None:
    """Dropout makes passes over one batch unlike."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        total = sum(int((batch(0, k)[1] >= 0).sum()) for k in which)
        for k in which:
            tokens, labels = batch(0, k)
            logits = F.dropout(model(tokens), 0.1, dropout).flatten(0, 1)
            (F.cross_entropy(logits, labels.flatten(), reduction="sum") / total).backward()
        optimizer.step()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    notes = [note for note in report.coverage.notes if "on one batch" in note]
    assert report.verdict == "clean" and len(notes) == int(told and not dropout)
    assert all("the 3 accumulation steps of data rank 0" in note for note in notes)
