"""A rank reads no gradient of a parameter that another one updates and sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


@pytest.mark.parametrize(("how", "verdict"), [("", "clean"), ("summed", "undetermined")])
def test_what_owners_update_by_hand_and_broadcast_is_judged_by_their_gradients(
    tmp_path: Path, how: str, verdict: str
) -> None:
    run = tmp_path / "run"
    launch("owners_workers:train", (str(run), how, False), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert (report.verdict, report.findings) == (verdict, []), report.reasons
    assert not how or "x 2" in report.reasons[0], report.reasons


def test_a_rank_that_gets_all_parameters_from_another_is_not_accused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch("owners_workers:train", (str(run), "", True), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert report.findings == [], report.reasons


@pytest.mark.parametrize("sends", ["flat", "gather", "object"])
@pytest.mark.parametrize(("how", "verdict"), [("divided", "clean"), ("summed", "undetermined")])
def test_parameters_that_come_in_other_tensors_are_judged_by_their_owners_gradients(
    tmp_path: Path, how: str, verdict: str, sends: str
) -> None:
    run = tmp_path / "run"
    launch("owners_workers:train", (str(run), how, False, sends), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert (report.verdict, report.findings) == (verdict, []), report.reasons


def test_ranks_that_step_with_what_a_reduction_left_to_them_are_accused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launch("owners_workers:train", (str(run), "divided", False, "never"), 2, timeout_s=60)
    (finding,) = [one for one in diagnose(read_run(run)).findings if one.code == "GS103"]
    assert finding.ranks == [0, 1]


def test_a_training_that_ends_before_owners_send_accuses_nobody(tmp_path: Path) -> None:
    """Rank 1, which owns fewer parameters, is not seen to have stepped; rank 0 has read none of rank 1's."""
    run = tmp_path / "run"
    launch("owners_workers:train", (str(run), "divided", False, "ends"), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert (report.verdict, report.findings) == ("undetermined", [])
