"""Clips that are wrong only when ranks are seen together, and one that is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch


def judged(run_dir: Path, worker: str, *args: object) -> Report:
    launch(f"clip_workers:{worker}", args, 2, timeout_s=120, log_dir=run_dir.parent / "logs")
    return diagnose(read_run(run_dir))


def test_a_clip_by_hand_with_each_stages_own_norm_is_local(tmp_path: Path) -> None:
    config = TrainConfig(axes=Axes(pp=2), microbatches=2, max_norm=0.1, faults=("clip-by-hand-local",))
    (finding,) = judged(tmp_path / "run", "train", config, str(tmp_path / "run")).findings
    assert finding.code == "GS601"
    assert "to norm 0.1 of what lies on it" in finding.explanation
    assert finding.first_event is not None and finding.first_event.kind == "grad_write"


def test_a_clip_by_hand_with_one_stages_norm_on_all_ranks_names_these_ranks(tmp_path: Path) -> None:
    config = TrainConfig(axes=Axes(pp=2), microbatches=2, max_norm=0.1)
    (finding,) = judged(tmp_path / "run", "train_with_one_stages_norm", config, str(tmp_path / "run")).findings
    assert (finding.code, finding.ranks) == ("GS601", [0, 1])
    assert "leaves norm 0.1 of what lies on rank 0, where all gradients" in finding.explanation
    assert finding.factor.observed is not None and finding.factor.observed < 0.99


def test_a_clip_by_hand_may_count_a_tied_matrix_once(tmp_path: Path) -> None:
    config = TrainConfig(axes=Axes(pp=2), microbatches=2, max_norm=0.1, tied_embeddings=True, faults=("clip-by-hand",))
    report = judged(tmp_path / "run", "train", config, str(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("left_out", ["head.weight", "embedding.weight"])
def test_a_tied_matrix_that_is_not_summed_is_told_beside_a_clip_by_hand_that_counts_it_on_one_stage(
    left_out: str, summed: bool, tmp_path: Path
) -> None:
    faults = () if summed else ("tied-embedding-across-pp",)
    config = TrainConfig(axes=Axes(pp=2), microbatches=2, max_norm=0.1, tied_embeddings=True, faults=faults)
    report = judged(tmp_path / "run", "train_with_one_stages_norm", config, str(tmp_path / "run"), left_out)
    assert [(finding.code, finding.num_parameters) for finding in report.findings] == ([] if summed else [("GS703", 1)])
    assert (report.verdict == "clean") == summed


@pytest.mark.parametrize(
    ("how", "found"),
    [("averaged", []), ("summed", [("GS104", 2.0, 4)]), ("left", [("GS103", 2.0, 4)])],
)
def test_what_is_wrong_with_most_parameters_is_no_part_of_a_clip_by_hand(
    how: str, found: list[tuple[str, float, int]], tmp_path: Path
) -> None:
    """The one that is right tells what the clip multiplies by; it was accused instead, or besides."""
    report = judged(tmp_path / "run", "most_by_hand", str(tmp_path / "run"), how)
    told = [(one.code, one.factor.observed, one.num_parameters) for one in report.findings]
    assert told == [(code, pytest.approx(factor, rel=1e-4), num) for code, factor, num in found]
    assert (report.verdict == "clean") == (how == "averaged")


@pytest.mark.parametrize("clip", ["by squares", "by squares, only summed", "by squares, they lie there"])
def test_a_division_in_a_buffer_is_seen_before_a_clip_that_acts(clip: str, tmp_path: Path) -> None:
    report = judged(tmp_path / "run", "reduced_by_hand", str(tmp_path / "run"), clip)
    assert (report.verdict, report.findings) == ("undetermined" if "only" in clip else "clean", [])


@pytest.mark.parametrize(
    ("clip", "codes"),
    [("before", ["GS605"]), ("in the loop", ["GS605"]), ("after", []), ("after, and averaged again", [])],
)
def test_gradients_that_are_reduced_by_hand_are_clipped_afterwards(clip: str, codes: list[str], tmp_path: Path) -> None:
    report = judged(tmp_path / "run", "reduced_by_hand", str(tmp_path / "run"), clip)
    assert [finding.code for finding in report.findings] == codes
    if codes:
        event = report.findings[0].first_event
        assert event is not None and event.kind == "clip"
        assert "before they were complete" in report.findings[0].explanation


@pytest.mark.parametrize(
    ("clip", "code", "line"),
    [("by hand", "", ""), ("by hand, not reduced", "GS103", "all_reduce("), ("by hand, halved", "GS000", "mul_(0.5)")],
)
def test_copies_that_differ_are_clipped_by_their_own_norms_and_the_clip_is_not_to_blame(
    clip: str, code: str, line: str, tmp_path: Path
) -> None:
    report = judged(tmp_path / "run", "reduced_by_hand", str(tmp_path / "run"), clip)
    if not code:
        assert (report.verdict, report.findings) == ("clean", [])
        return
    (finding,) = report.findings
    assert (finding.code, finding.num_parameters) == (code, 1)
    assert finding.first_event is not None
    file, number = str(finding.first_event.file), finding.first_event.line or 0
    assert line in Path(file).read_text().splitlines()[number - 1]


@pytest.mark.parametrize("clip", ["own", "own, copies counted once"])
def test_a_clip_by_each_tensor_parallel_ranks_own_norm_is_local(clip: str, tmp_path: Path) -> None:
    (finding,) = judged(tmp_path / "run", "train_tensor_parallel", str(tmp_path / "run"), clip).findings
    assert (finding.code, finding.ranks) == ("GS601", [0, 1])
    assert "to norm 0.1 of what lies on it" in finding.explanation
    assert finding.first_event is not None and (finding.first_event.file or "").endswith("clip_workers.py")


def test_a_clip_by_the_mean_of_the_ranks_norms_is_told_by_the_norm_that_it_leaves(tmp_path: Path) -> None:
    (finding,) = judged(tmp_path / "run", "train_tensor_parallel", str(tmp_path / "run"), "averaged").findings
    assert (finding.code, finding.ranks) == ("GS602", [0, 1])
    assert "where 0.1 is the mean of the ranks' own norms (ranks 0 and 1)" in finding.explanation
    assert "cuts too little" in finding.explanation


def test_copies_that_a_rank_leaves_out_of_the_norm_are_clipped_by_it_all_the_same(tmp_path: Path) -> None:
    report = judged(tmp_path / "run", "train_tensor_parallel", str(tmp_path / "run"), "shared, copies counted once")
    assert (report.verdict, report.findings) == ("clean", [])


def test_copies_that_tensor_parallel_ranks_scale_apart_are_told_whatever_scales_them(tmp_path: Path) -> None:
    (finding,) = judged(tmp_path / "run", "train_tensor_parallel", str(tmp_path / "run"), "own, to no norm").findings
    assert (finding.code, finding.ranks) == ("GS000", [0, 1])
    assert "what they hold drifts apart" in finding.explanation


@pytest.mark.parametrize("whole", [True, False])
def test_norms_of_summands_leave_a_clip_by_hand_open(whole: bool, tmp_path: Path) -> None:
    """Each rank's summand of a DTensor's Partial gradient has another norm: shards of one model were clipped apart."""
    report = judged(tmp_path / "run", "clip_summands", str(tmp_path / "run"), whole)
    assert (report.verdict, report.findings) == ("undetermined", [])
    told = any("ranks of one model are clipped by hand by unlike coefficients" in reason for reason in report.reasons)
    assert told != whole


@pytest.mark.parametrize(
    ("norm", "codes"), [("all", []), ("own", ["GS601"]), ("unscaled, all", []), ("unscaled, own", ["GS601"])]
)
def test_a_line_that_clips_by_each_ranks_norm_may_unscale_as_well(norm: str, codes: list[str], tmp_path: Path) -> None:
    """The loss scale that it divides by was accused at the loss, beside the clip."""
    report = judged(tmp_path / "run", "zero_by_parameters", str(tmp_path / "run"), norm)
    assert sorted({finding.code for finding in report.findings}) == codes
    if codes and "unscaled" not in norm:
        assert any("a clip by hand at clip_workers.py" in reason for reason in report.reasons), report.reasons


@pytest.mark.parametrize("norm", ["never", "never, summed"])
def test_a_line_that_unscales_a_copy_that_nobody_knew_yet_is_no_fault_of_the_first_step(
    norm: str, tmp_path: Path
) -> None:
    """Of sums over ranks, the loss scale twice was accused at the loss, and a division by it behind."""
    report = judged(tmp_path / "run", "zero_by_parameters", str(tmp_path / "run"), norm)
    told = [(finding.code, finding.factor.observed, finding.steps) for finding in report.findings]
    assert told == ([("GS104", pytest.approx(2), [0, 1, 2])] if "summed" in norm else [])
    assert (report.verdict == "clean") == (not told)
