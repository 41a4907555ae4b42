"""Frames of a trace that are damaged or gone: their steps stay open, nobody is accused, other steps are judged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from damaged_runs import damage, write_in_frames
from random_trainers import culprit_of
from simulator import World
from trainer_families import make_case

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss, StepEnd
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.frames import MAGIC, Damage, frame, iter_frames
from gradcheck_dist.trace.reader import decode_records
from gradcheck_dist.trace.run import read_run

STEPS, TIMES = 3, 3
FAMILIES = ("healthy-trainers", "reduced-by-hand", "double-averaging", "mean-of-means", "inverted-no-sync")


def recorded(folder: Path, family: str, seed: int) -> Path:
    trainer = make_case(family, seed).trainer
    return write_in_frames(folder, [World(trainer, STEPS * seed + step) for step in range(STEPS)], random.Random(seed))


def accused(report: Report) -> set[tuple[object, ...]]:
    errors = [finding for finding in report.findings if finding.severity == "error"]
    return {(finding.code, culprit_of(finding).kind, culprit_of(finding).unrecorded) for finding in errors}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_lost_accuses_nobody(family: str, seed: int, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", recorded(tmp_path / "whole", family, seed)
    before, generator = accused(diagnose(read_run(whole))), random.Random(seed)
    for _ in range(TIMES):
        shutil.copytree(whole, run)
        damage(run, generator)
        report, streamed = diagnose(read_run(run)), diagnose_run(run)
        assert accused(report) <= before, report.reasons
        assert (streamed.reasons, accused(streamed)) == (report.reasons, accused(report))
        shutil.rmtree(run)


def without(file: Path, step: int, kind: type, *, flipped: bool) -> None:
    """Spoil the frame with the first record of a kind in a step, or leave it out."""
    kept = MAGIC
    pieces = [bytes(piece) for piece, _ in iter_frames(file.read_bytes(), len(MAGIC)) if not isinstance(piece, Damage)]
    gone = next(
        index for index, piece in enumerate(pieces)
        if any(type(record) is kind and record.step == step for record in decode_records(piece))
    )  # fmt: skip
    for index, piece in enumerate(pieces):
        whole = frame(piece)
        kept += whole if index != gone else whole[:-1] + bytes([whole[-1] ^ 1]) if flipped else b""
    file.write_bytes(kept)


@pytest.mark.parametrize("flipped", [True, False])
@pytest.mark.parametrize("kind", [Loss, StepEnd])
def test_the_step_is_named_and_the_others_are_judged(kind: type, flipped: bool, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", "double-averaging", 0)
    without(run / "rank-00001.trace", 1, kind, flipped=flipped)
    report = diagnose(read_run(run))
    (finding,) = report.findings
    assert (finding.code, finding.steps) == ("GS101", [0, 2])
    (reason,) = [reason for reason in report.reasons if reason.startswith("step 1 ")]
    assert "rank 1's trace lacks" in reason
    assert ("checksum differs" in reason) is flipped


def test_a_healthy_run_stays_undetermined_where_something_is_lost(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", "healthy-trainers", 1)
    assert diagnose(read_run(run)).verdict == "clean"
    without(run / "rank-00001.trace", 1, Loss, flipped=True)
    report = diagnose(read_run(run))
    assert report.verdict == "undetermined"
    assert report.next_step.startswith("Copy that rank's trace again")


def test_steps_that_lost_the_same_are_named_together(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", "healthy-trainers", 1)
    for step in (0, 1):
        without(run / "rank-00001.trace", step, StepEnd, flipped=True)
    report = diagnose(read_run(run))
    assert [reason.partition(":")[0] for reason in report.reasons] == ["steps 0 and 1 are not judged"]
    assert diagnose_run(run).reasons == report.reasons
