"""Steps in columns of simulated trainers, of which the truth is known: judged as far as the records go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from column_runs import one_wrong, write_columns
from random_trainers import global_mean, microbatch_mean, rank_mean
from simulator import Hand, Key, Trainer, World
from trainer_families import FAMILIES, make_case

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import Loss, LossGradient, OptimizerStep, StepEnd
from gradcheck_dist.stream import shares, summaries
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.stream.plain import MeasuredReader
from gradcheck_dist.trace import columns
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
    assert "in 3 steps without a measurement" in finding.explanation


@pytest.mark.parametrize(("mean", "code"), [(microbatch_mean, "GS301"), (rank_mean, "GS302")])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_steps_whose_losses_take_the_same_mean_of_other_tokens_have_its_cause(
    mean: Callable[[float], Callable[[Key, dict[Key, int]], float]], code: str, factor: float, tmp_path: Path
) -> None:
    trainer = Trainer(mean(2 * factor), accumulation=2)
    run = write_columns(tmp_path / "run", [World(trainer, seed=step) for step in range(4)], samples_of=0)
    (finding,) = diagnose_run(run).findings
    assert (finding.code, finding.steps) == (code, [0, 1, 2, 3])
    other = World(replace(trainer, root=mean(6 * factor)), seed=4)
    run = write_columns(tmp_path / "other", [World(trainer, seed=0), other], samples_of=0)
    assert [(one.code, one.steps) for one in diagnose_run(run).findings] == [(code, [0]), ("GS000", [1])]


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


@pytest.mark.parametrize("samples_of", [0, None])
def test_what_a_trainer_divides_by_hand_accuses_nobody(samples_of: int | None, tmp_path: Path) -> None:
    by_hand = Trainer(global_mean(2.0 * 64), accumulation=2, hands=(Hand("before_optimizer", 1 / 64),))
    worlds = [World(by_hand, seed=step) for step in range(5)]
    report = diagnose_run(write_columns(tmp_path / "run", worlds, samples_of))
    assert all(world.is_right() for world in worlds)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert sum("off as documented" in reason for reason in report.reasons) == 1
    assert any("--steps" in reason for reason in report.reasons)


def test_what_a_trainer_divides_by_hand_accuses_nobody_beside_a_measured_fault(tmp_path: Path) -> None:
    """By the records all steps are off by the 64 that nobody recorded, and the measured one by 3 in one pass alone."""

    def off_in_one(key: Key, tokens: dict[Key, int]) -> float:
        return global_mean(2.0 * 64)(key, tokens) * (3.0 if key == (1, 1, 0) else 1.0)

    by_hand = Trainer(global_mean(2.0 * 64), accumulation=2, hands=(Hand("before_optimizer", 1 / 64),))
    worlds = [World(replace(by_hand, root=off_in_one) if step == 0 else by_hand, seed=step) for step in range(5)]
    report = diagnose_run(write_columns(tmp_path / "run", worlds, samples_of=0))
    assert {step for finding in report.findings for step in finding.steps} == {0}
    assert any("other weights were measured" in reason for reason in report.reasons)


def test_a_factor_that_measured_steps_know_nothing_of_is_found(tmp_path: Path) -> None:
    right, twice = (Trainer(global_mean(factor), accumulation=2) for factor in (2.0, 4.0))
    worlds = [World(twice if step == 3 else right, seed=step) for step in range(5)]
    report = diagnose_run(write_columns(tmp_path / "run", worlds, samples_of=0))
    assert [(finding.code, finding.steps) for finding in report.findings] == [("GS000", [3])]


def test_passes_that_were_emptied_are_left_open(tmp_path: Path) -> None:
    right = Trainer(global_mean(2.0), accumulation=2)
    worlds = [World(replace(right, zero_between=step == 3), seed=step) for step in range(5)]
    report = diagnose_run(write_columns(tmp_path / "run", worlds, samples_of=0))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(reason.startswith("step 3") and "emptied" in reason for reason in report.reasons)


@pytest.mark.parametrize("objective", ["global-token-mean", "microbatch-mean", "rank-token-mean"])
def test_passes_without_tokens_count_for_nothing(objective: str, tmp_path: Path) -> None:
    roots = {"global-token-mean": global_mean, "microbatch-mean": microbatch_mean, "rank-token-mean": rank_mean}

    def root(key: Key, tokens: dict[Key, int]) -> float:
        counted = {one: count for one, count in tokens.items() if count}
        return roots[objective](2.0)(key, counted) if key in counted else 1.0

    worlds = [World(Trainer(root, accumulation=2), seed=step) for step in range(4)]
    worlds[1].num_tokens[0, 1, 0] = 0
    worlds[2].num_tokens |= {(1, 0, 0): 0, (1, 1, 0): 0}
    report = diagnose_run(write_columns(tmp_path / "run", worlds), objective=objective)
    assert report.findings == []
    assert len(report.reasons) == 1
    assert "documented weights of 4 steps (13 contributions) were compared, 0 steps are off" in report.coverage.notes[0]


def test_losses_of_one_pass_are_one_contribution(tmp_path: Path) -> None:
    """A cross-entropy in chunks: two losses a pass, means over the microbatches."""
    worlds = [World(Trainer(microbatch_mean(2.0), accumulation=2), seed=step) for step in range(2)]
    for world in worlds:
        world.run()
        world.run = lambda: None  # type: ignore[method-assign, assignment, return-value]
        for process in world.ranks:
            events = process.trace.events
            for event in [one for one in events if isinstance(one, Loss | LossGradient)]:
                assert event.num_tokens is not None
                events.append(
                    msgspec.structs.replace(
                        event, seq=event.seq + 500, loss_id=event.loss_id + 500, num_tokens=event.num_tokens // 2
                    )
                )
                events[events.index(event)] = msgspec.structs.replace(event, num_tokens=-(-event.num_tokens // 2))
    report = diagnose_run(write_columns(tmp_path / "run", worlds), objective="microbatch-mean")
    assert report.findings == []
    assert len(report.reasons) == 1


def test_steps_that_were_too_many_for_columns_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_SHAPES", 1)
    right = [Trainer(global_mean(2.0), accumulation=1 + step % 3) for step in range(8)]
    worlds = [World(replace(one, root=global_mean(1.0)) if step == 5 else one, seed=step)
              for step, one in enumerate(right)]  # fmt: skip
    for world in worlds:
        world.run()
        world.run = lambda: None  # type: ignore[method-assign, assignment, return-value]
        for process in world.ranks:
            process.trace.events.append(StepEnd(seq=900, t_ns=0, step=0, duration_s=0.1, probe_s=0.0))
    report = diagnose_run(write_columns(tmp_path / "run", worlds))
    assert [finding.steps for finding in report.findings] == [[5]]
    assert report.run.steps == []
    assert "documented weights of 8 steps" in report.coverage.notes[0]


def test_steps_of_several_optimizers_are_read_whole(tmp_path: Path) -> None:
    """Each optimizer ends the step: its events behind the first end belong to it."""
    world = World(Trainer(global_mean(2.0), data_ranks=1))
    events = world.run().ranks[0].events
    [step] = [event for event in events if isinstance(event, OptimizerStep)]
    end = StepEnd(seq=900, t_ns=0, step=0, duration_s=0.1, probe_s=0.0)
    behind = [end, msgspec.structs.replace(step, seq=901), msgspec.structs.replace(end, seq=902)]
    world.ranks[0].trace.events += behind
    world.run = lambda: None  # type: ignore[method-assign, assignment, return-value]
    reader = MeasuredReader(write_columns(tmp_path / "run", [world], samples_of=0) / "rank-00000.trace")
    [block] = [block for blocks in reader.chunks() for block in blocks]
    assert (block.num_steps, len(block.shape.weight_rows)) == (1, 1)


def test_steps_in_columns_can_be_chosen(tmp_path: Path) -> None:
    run = one_wrong(tmp_path / "run", samples_of=2)
    assert [finding.steps for finding in diagnose_run(run, steps=range(6, 9)).findings] == [[7]]
    report = diagnose_run(run, steps=range(8, 10))
    assert (report.findings, report.verdict) == ([], "undetermined")
    assert "steps 8 to 9" in report.coverage.notes[0]
    with pytest.raises(GradcheckError, match="none of the steps asked for"):
        diagnose_run(run, steps=range(20, 30))


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
