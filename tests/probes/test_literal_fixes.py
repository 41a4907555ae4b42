"""What a finding tells to do makes the gradient right where it is done to the letter, at the line that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

RANKS = {"parted": 4, "few_ranks": 4, "gathered": 4}


def trained(trainer: str, fault: str, tmp_path: Path) -> Report:
    warm_up()
    ranks = RANKS.get(trainer, 2)
    launch("literal_fix_workers:run", (trainer, fault, str(tmp_path / "run")), ranks, timeout_s=100)
    return diagnose(read_run(tmp_path / "run"))


def found(trainer: str, fault: str, tmp_path: Path) -> Finding:
    (finding,) = trained(trainer, fault, tmp_path).findings
    return finding


def is_at(finding: Finding, fault: str) -> bool:
    lines = (Path(__file__).parent / "literal_fix_workers.py").read_text().splitlines()
    place = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {fault}"))
    return finding.first_event is not None and finding.first_event.line == place


@pytest.mark.parametrize(
    "trainer", ["parted", "few_ranks", "experts", "owners", "gathered", "branches", "counted_branches", "buffers"]
)
def test_right_ones_are_clean(trainer: str, tmp_path: Path) -> None:
    report = trained(trainer, "", tmp_path)
    assert (report.verdict, [finding.code for finding in report.findings]) == ("clean", [])


def test_ranks_of_one_batch_are_known_without_labels(tmp_path: Path) -> None:
    # Their embeddings' gradients are summands, so no gradient tells; what the models are given, and the losses, do.
    finding = found("parted", "counted_again", tmp_path)
    assert (finding.code, finding.num_parameters) == ("GS102", 5)
    assert is_at(finding, "counted_again")


def test_a_loss_is_no_way_out_for_some_parameters(tmp_path: Path) -> None:
    finding = found("parted", "parts_averaged", tmp_path)
    assert (finding.num_parameters, finding.factor.observed) == (5, pytest.approx(0.5))
    assert is_at(finding, "parts_averaged")
    assert "loss carry" not in finding.fix
    assert "multiply the loss" not in finding.fix


def test_what_is_mixed_has_no_factor_of_its_own(tmp_path: Path) -> None:
    finding = found("parted", "mixed", tmp_path)
    assert finding.code == "GS105"
    assert is_at(finding, "mixed")


def test_a_reduction_over_too_few_ranks_is_told_with_what_divides_behind_it(tmp_path: Path) -> None:
    finding = found("few_ranks", "over_two", tmp_path)
    assert finding.code == "GS103"
    assert is_at(finding, "over_two")
    assert finding.pattern == "2 of 3 other ranks' contributions x 0, the rest x 2"
    assert "x 2 of what it should" in finding.fix


def test_a_division_that_is_meant_for_experts_alone_is_told(tmp_path: Path) -> None:
    finding = found("experts", "divides_all", tmp_path)
    assert (finding.code, finding.num_parameters) == ("GS000", 5)
    assert is_at(finding, "divides_all")
    assert finding.fix.startswith("Drop it for these parameters")


def test_what_an_average_divides_others_by_is_told(tmp_path: Path) -> None:
    finding = found("experts", "undivided", tmp_path)
    assert finding.factor.observed == pytest.approx(2)
    assert finding.fix.startswith("Divide these gradients by 2, too")


def test_owners_are_not_told_to_reduce_over_themselves(tmp_path: Path) -> None:
    finding = found("owners", "vectors_left_out", tmp_path)
    assert finding.code == "GS103"
    assert is_at(finding, "vectors_left_out")
    assert finding.fix.endswith("does with the others.")


def test_shards_that_are_gathered_are_no_averaged_parameters(tmp_path: Path) -> None:
    # Something that is no optimizer changes the model on every rank, as an average of replicas that train apart does.
    finding = found("gathered", "replica_left_out", tmp_path)
    assert (finding.code, finding.steps) == ("GS103", [0, 1])
    assert is_at(finding, "replica_left_out")


@pytest.mark.parametrize("trainer", ["branches", "counted_branches"])
def test_branches_of_a_condition_are_one_loop(trainer: str, tmp_path: Path) -> None:
    finding = found(trainer, "undivided", tmp_path)
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(3))
    assert "the rest right" not in finding.pattern


@pytest.mark.parametrize("trainer", ["two_losses", "kinds"])
def test_branches_of_several_losses_accuse_nobody(trainer: str, tmp_path: Path) -> None:
    assert trained(trainer, "", tmp_path).verdict == "undetermined"


def test_what_is_added_to_a_buffer_again_is_told(tmp_path: Path) -> None:
    finding = found("buffers", "kept", tmp_path)
    assert finding.factor.expression == "(K-k)^1"
    assert finding.fix.startswith("Empty .grad")
