"""Steps in columns of simulated trainers, of which the truth is known: judged as far as the records go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from column_runs import one_wrong, write_columns
from random_trainers import global_mean
from simulator import Trainer, World
from trainer_families import FAMILIES, make_case

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream import shares, summaries
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import trace_files


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_documented_is_judged_and_never_a_right_trainer_accused(family: str, tmp_path: Path) -> None:
    left_open = 0
    for seed in range(3):
        trainer = replace(make_case(family, seed).trainer, hands=())  # what nobody recorded cannot be seen here
        worlds = [World(trainer, seed=100 * seed + step) for step in range(3)]
        run = write_columns(tmp_path / f"{seed}", worlds)
        report = diagnose_run(run)
        right = all(world.is_right() for world in worlds)
        assert bool(report.findings) <= (not right), (trainer, report.findings)
        if not report.findings and not right:
            assert len(report.reasons) > 1, trainer  # it says why it cannot tell
            left_open += 1
        if report.findings:
            steps = {step for finding in report.findings for step in finding.steps}
            assert steps <= {step for step, world in enumerate(worlds) if not world.is_right()}
    assert left_open <= 3


def test_one_contribution_of_one_step_is_found_and_described(tmp_path: Path) -> None:
    report = diagnose_run(one_wrong(tmp_path / "run"))
    [finding] = report.findings
    assert finding.steps == [7]
    assert finding.ranks == [1]
    assert finding.factor.observed == pytest.approx(3.0)
    assert "(accumulation step 1, microbatch 0) of rank 1" in finding.pattern
    assert finding.first_event is not None
    assert (finding.first_event.kind, finding.first_event.file, finding.first_event.line) == ("loss", "train.py", 14)
    assert report.exit_code == 1
    assert any("12 steps (72 contributions) were compared, 1 step is off" in text for text in report.coverage.notes)


@pytest.mark.parametrize("family", ["double-averaging", "wrong-normalizer", "repeated-reduction"])
def test_steps_that_are_off_as_a_measured_one_is_have_its_cause(family: str, tmp_path: Path) -> None:
    trainer = replace(make_case(family, 1).trainer, clip=None, loss_scale=1.0, dtype="float32", loss_dtype="float32")
    worlds = [World(trainer, seed=step) for step in range(4)]
    measured = diagnose_run(write_columns(tmp_path / "measured", worlds[:1], samples_of=0))
    run = write_columns(tmp_path / "run", [World(trainer, seed=step) for step in range(4)], samples_of=0)
    [finding] = diagnose_run(run).findings
    assert finding.steps == [0, 1, 2, 3]
    assert [(one.code, one.first_event) for one in measured.findings] == [(finding.code, finding.first_event)]
    assert "in 3 step(s) that were not measured" in finding.explanation


def test_steps_that_are_off_otherwise_than_a_measured_one_have_a_finding_of_their_own(tmp_path: Path) -> None:
    twice, thrice = (Trainer(global_mean(factor), op="sum", accumulation=2) for factor in (2.0, 3.0))
    run = write_columns(tmp_path / "run", [World(twice, seed=0), World(thrice, seed=1)], samples_of=0)
    assert [(f.code, f.steps) for f in diagnose_run(run).findings] == [("GS303", [0]), ("GS000", [1])]


def test_right_steps_alone_prove_nothing_but_beside_measured_ones_they_are_clean(tmp_path: Path) -> None:
    alone = diagnose_run(one_wrong(tmp_path / "alone", wrong=99))
    assert alone.verdict == "undetermined"
    assert "no step was recorded with samples" in alone.reasons[0]
    beside = diagnose_run(one_wrong(tmp_path / "beside", wrong=99, samples_of=4))
    assert (beside.verdict, beside.reasons) == ("clean", [])
    assert beside.run.steps == [4]


def test_other_processes_and_smaller_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = one_wrong(tmp_path / "run")
    expected = as_json(diagnose_run(run))
    monkeypatch.setattr(shares, "WORTH_BYTES", 0)
    assert as_json(diagnose_run(run, jobs=2)) == expected
    reader = summaries.BlockReader(run / "rank-00000.trace")
    assert sum(block.num_steps for blocks in reader.chunks(read_bytes=50) for block in blocks) == 12


def test_first_stops_at_the_first_divergence(tmp_path: Path) -> None:
    report = diagnose_run(one_wrong(tmp_path / "run"), first=True)
    assert [finding.steps for finding in report.findings] == [[7]]


def test_a_rank_that_ended_early_leaves_its_later_steps_open(tmp_path: Path) -> None:
    run = one_wrong(tmp_path / "run", wrong=99)
    file = run / "rank-00001.trace"
    (file).write_bytes(file.read_bytes()[:-5])
    report = diagnose_run(run)
    assert not report.findings
    assert any("rank 1 recorded nothing of them" in reason for reason in report.reasons)
    assert any("rank 1:" in problem and "cut" in problem for problem in report.coverage.problems)


def test_ranks_with_the_same_labels_are_one_coordinate_unless_they_reduce_together(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, each with the loss of the same tokens: their weight is 1/N, not half of it."""
    alone = Trainer(global_mean(), data_ranks=1, impl="none", accumulation=2)
    worlds = [World(alone, seed=step) for step in range(3)]
    twins = [World(alone, seed=step) for step in range(3)]
    for world, twin in zip(worlds, twins, strict=True):
        world.run()
        twin.run()
        world.ranks += twin.ranks
        world.run = lambda: None  # type: ignore[method-assign, assignment, return-value]
    report = diagnose_run(write_columns(tmp_path / "run", worlds))
    assert not report.findings
    assert len(report.reasons) == 1


def as_json(report: Report) -> bytes:
    return msgspec.json.encode(report)


def test_what_is_kept_of_a_block_does_not_keep_the_block(tmp_path: Path) -> None:
    clipping = Trainer(global_mean(2.0), clip=1.0)
    run = write_columns(tmp_path / "run", [World(clipping, seed=step) for step in range(4)])
    (round_, *_) = summaries.rounds(trace_files(run), "global-token-mean")
    assert round_.summaries and np.isfinite(round_.summaries[0].norm).all()
    for summary in round_.summaries:
        for name in ("num_tokens", "low", "high", "hashes", "loss", "norm"):
            array = getattr(summary, name)
            while isinstance(array.base, np.ndarray):
                array = array.base
            assert array.base is None, f"{name} is a view of the file's bytes"
