"""Two axes at once, and reductions in parts: right ones are clean, each fault is one finding, at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

RANKS = {
    "nodes": 3,
    "flat": 4,
    "tensor_parallel": 4,
    "pipeline": 4,
    "hook": 3,
    "cast": 3,
    "functional": 3,
    "no_batch": 2,
    "sequence_hooks": 4,
    "hook_over_nodes": 4,
    "hook_of_shared": 4,
    "hook_beside_activations": 4,
}


def trained(trainer: str, fault: str, tmp_path: Path) -> Report:
    warm_up()
    launch("combined_workers:run", (trainer, fault, str(tmp_path / "run")), RANKS.get(trainer, 4), timeout_s=100)
    return diagnose(read_run(tmp_path / "run"))


def line_of(fault: str) -> int:
    lines = (Path(__file__).parent / "combined_workers.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {fault}"))


@pytest.mark.parametrize("trainer", RANKS)
def test_right_ones_are_clean(trainer: str, tmp_path: Path) -> None:
    report = trained(trainer, "", tmp_path)
    assert (report.verdict, [finding.code for finding in report.findings]) == ("clean", [])


@pytest.mark.parametrize(
    ("trainer", "fault", "code", "at_line"),
    [
        ("nodes", "no_leaders", "GS103", False),
        ("nodes", "leaders_twice", "GS102", True),
        ("nodes", "leader_halves", "GS000", True),
        ("nodes", "count_of_node", "GS305", False),
        ("flat", "summed_again", "GS102", True),
        ("tensor_parallel", "head_left_out", "GS103", False),
        ("tensor_parallel", "plain_norm", "GS703", False),
        ("tensor_parallel", "doubled", "GS303", False),
        ("tensor_parallel", "over_all", "GS105", True),
        ("tensor_parallel", "over_shards", "GS105", True),
        ("pipeline", "last_count", "GS305", True),
        ("pipeline", "halved", "GS000", True),
        ("pipeline", "averaged", "GS101", False),
        ("pipeline", "averaged means", "GS101", False),  # by two lines, one for each stage
        ("pipeline", "unreduced", "GS103", False),
        ("pipeline", "emptied", "GS401", False),
        ("hook", "never_reduced", "GS103", True),
        ("cast", "averaged_again", "GS101", True),
        ("functional", "not_copied", "GS103", False),
        ("hook_over_nodes", "halved_in_hook", "GS000", True),
        ("hook_of_shared", "shared_left_out", "GS103", False),
        ("hook_of_shared", "parts_summed", "GS105", False),
        ("hook_of_shared", "doubled_in_hook", "GS000", False),
        ("hook_beside_activations", "doubled_in_hook", "GS000", False),
        ("sequence_hooks", "parts_left_out", "GS103", False),
        ("sequence_hooks", "parts_each_pass", "GS102", True),
        ("sequence_hooks", "parts_scaled", "GS000", False),
    ],
)
def test_a_fault_is_one_finding_on_all_ranks(
    trainer: str, fault: str, code: str, at_line: bool, tmp_path: Path
) -> None:
    report = trained(trainer, fault, tmp_path)
    (finding,) = report.findings
    assert (finding.code, finding.ranks) == (code, list(range(RANKS[trainer])))
    assert finding.steps == [0, 1]
    event = finding.first_event
    assert event is not None
    assert not at_line or event.line == line_of(fault)


def test_a_hook_may_reduce_what_ranks_share_one_by_one(tmp_path: Path) -> None:
    report = trained("hook_of_shared", "one by one", tmp_path)
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize(("fault", "codes"), [("", []), ("not over data", ["GS103"])])
def test_what_is_whole_on_parts_lacks_no_sum_over_them_beside_data_ranks(
    fault: str, codes: list[str], tmp_path: Path
) -> None:
    report = trained("whole_on_parts", fault, tmp_path)
    assert [finding.code for finding in report.findings] == codes
    assert bool(codes) or any("without any reduction over them" in reason for reason in report.reasons)


def test_two_divisions_that_stand_in_the_program_are_two_lines(tmp_path: Path) -> None:
    report = trained("flat", "divided_twice", tmp_path)
    assert [(one.code, one.factor.exact) for one in report.findings] == [("GS101", "1/4")] * 2
    lines = [one.first_event.line for one in report.findings if one.first_event is not None]
    assert lines == [line_of("divided_twice"), line_of("divided_twice") + 3]


def test_steps_of_ranks_stay_side_by_side_where_one_has_no_batch(tmp_path: Path) -> None:
    (finding,) = trained("no_batch", "doubled_later", tmp_path).findings
    assert (finding.code, finding.factor.exact, finding.steps) == ("GS303", "2", [1, 2, 3])


@pytest.mark.parametrize("parted_first", [False, True])
def test_a_sum_of_what_is_reduced_on_one_stage_alone_leaves_the_verdict_open(
    parted_first: bool, tmp_path: Path
) -> None:
    launch("part_workers:train", (parted_first, str(tmp_path / "run")), 4, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined" if parted_first else "clean", [])
    assert parted_first == any("is no combination of the recorded contributions" in one for one in report.reasons)


def test_a_whole_model_that_ranks_only_look_at_does_not_hide_a_tied_matrix_that_is_not_summed(tmp_path: Path) -> None:
    launch("part_workers:train", (False, str(tmp_path / "run"), False), 4, timeout_s=100)
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.num_parameters) == ("GS703", 1)


def test_a_rank_that_has_no_batch_in_the_first_step_leaves_all_open(tmp_path: Path) -> None:
    """Its parameters were first seen when they had moved, so that copies looked unlike (GS105)."""
    report = trained("no_batch", "none_at_first", tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("optimizers stepped on rank 1 before any loss was seen there" in reason for reason in report.reasons)
