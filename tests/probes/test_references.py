"""A gradient that is computed a second time, to compare the two, is no part of the step, and hides no fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_process import accumulate, judged, record
from probe_workers import Net, batch, token_sum
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

REFERENCES = ("stepped", "differentiated", "asked", "on one rank", "itself", "itself, emptied by hand")
FOUND = {"": [], "not divided": ["GS303"], "averaged twice": ["GS101"], "same batch": ["GS701"]}
SAME = 1e-5


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def ranks(run: Path, *arguments: str) -> tuple[Report, float]:
    results = launch("reference_workers:train", (str(run), *arguments), 2, timeout_s=60)
    return diagnose(read_run(run)), max(results)


def tells(report: Report) -> bool:
    return any("taken for a reference" in note for note in report.coverage.notes)


@pytest.mark.parametrize("fault", FOUND)
@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference_beside_ddp_is_left_out(tmp_path: Path, reference: str, fault: str) -> None:
    report, apart = ranks(tmp_path / "run", reference, fault)
    assert (apart < SAME) == (fault in ("", "same batch"))
    assert [one.code for one in report.findings] == FOUND[fault]
    assert report.verdict == ("findings" if fault else "clean")
    itself = reference.startswith("itself")
    assert tells(report) or (itself and fault == "same batch")
    if not itself and reference != "on one rank":  # some rank has another model that is never called
        assert report.coverage.parameters_total == report.coverage.parameters_observed == 5


@pytest.mark.parametrize(("fault", "found"), [("", []), ("not divided", ["GS000"]), ("not reduced", ["GS103"])])
def test_a_reference_beside_ranks_whose_reduction_nobody_records(tmp_path: Path, fault: str, found: list[str]) -> None:
    report, apart = ranks(tmp_path / "run", "unseen reduction", fault)
    assert (apart < SAME) == (not fault)
    assert [one.code for one in report.findings] == found and tells(report)


@pytest.mark.parametrize(("fault", "verdict"), [("", "undetermined"), ("not reduced", "findings")])
def test_a_reference_whose_loss_counts_nothing_is_known_by_its_start(tmp_path: Path, fault: str, verdict: str) -> None:
    report, _ = ranks(tmp_path / "run", "counts nothing", fault)
    assert tells(report) == (not fault)
    assert report.verdict == verdict


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("fault", ["", "not divided"])
def test_a_reference_beside_shards_by_hand(tmp_path: Path, stepped: bool, fault: str) -> None:
    results = launch("reference_workers:train_halves", (str(tmp_path), stepped, fault), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path))
    assert (max(results) < SAME) == (not fault)
    assert [one.code for one in report.findings] == FOUND[fault] and tells(report)


@pytest.mark.parametrize(("first", "steps"), [("reference", "0:2"), ("reference", "3:5"), ("trainer", "0:2")])
def test_what_is_trained_behind_a_reference_is_told_and_judged_where_it_is_recorded(
    tmp_path: Path, first: str, steps: str
) -> None:
    launch("reference_workers:train_one_after_the_other", (str(tmp_path), first, steps), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path))
    if (first, steps) == ("reference", "0:2"):
        assert report.verdict == "undetermined"
        assert any("SGD steps 5 parameters" in one and "--steps 3:6 records it" in one for one in report.reasons)
    else:
        assert [one.code for one in report.findings] == ["GS101"]


def test_another_model_that_nobody_reduces_is_no_reference(tmp_path: Path) -> None:
    report, _ = ranks(tmp_path / "run", "another model")
    assert [one.code for one in report.findings] == ["GS103"] and not tells(report)


def test_passes_that_are_lost_are_no_reference(tmp_path: Path) -> None:
    """As many tokens as the others have on all ranks."""
    launch("reference_workers:lose", (str(tmp_path),), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path))
    assert "GS401" in {one.code for one in report.findings} and not tells(report)


@pytest.mark.parametrize("copied", [True, False])
def test_a_second_model_that_its_optimizer_forgot_is_no_reference(tmp_path: Path, copied: bool) -> None:
    """In one process both get the same tokens: only a copy of the model is one."""
    other = Net()
    if not copied:
        other.embedding.reset_parameters()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for one in (model, other):
            accumulate(one)
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert (report.verdict, tells(report)) == (("clean", True) if copied else ("undetermined", False))


@pytest.mark.parametrize("divisor", [1, 2])
def test_one_batch_beside_its_parts_in_one_process(tmp_path: Path, divisor: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = [batch(0, k) for k in range(2)]
        num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
        whole = tuple(torch.cat(parts) for parts in zip(*data, strict=True))
        (token_sum(model, (whole[0], whole[1])) / num_tokens).backward()
        optimizer.zero_grad()
        for part in data:
            (token_sum(model, part) / num_tokens * 2 / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert [one.code for one in report.findings] == ["GS303"] * (divisor == 1) and tells(report)


def test_a_lost_pass_of_one_process_is_no_reference(tmp_path: Path) -> None:
    """As many tokens as the pass that is left."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for k in range(2):
            tokens, labels = batch(0, k)
            labels[:] = labels.abs() % 20
            optimizer.zero_grad()
            (token_sum(model, (tokens, labels)) / 48).backward()
        optimizer.step()

    record(step, tmp_path / "run", steps=2)
    report = judged(tmp_path / "run")
    assert "GS401" in {one.code for one in report.findings} and not tells(report)
