"""Of two axes of as many ranks the one is named that is wrong, and no line that is right for all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

WORKER = Path(__file__).parent / "axis_words_workers.py"


def trained(folder: Path, variant: str) -> Report:
    warm_up()
    launch("axis_words_workers:train", (str(folder / "run"), variant), 4, timeout_s=100)
    return diagnose(read_run(folder / "run"))


def line_of(finding: Finding) -> str:
    event = finding.first_event
    return WORKER.read_text().splitlines()[(event.line or 0) - 1] if event is not None else ""


@pytest.mark.parametrize("variant", ["", "context"])
def test_a_right_one_is_clean(tmp_path: Path, variant: str) -> None:
    assert trained(tmp_path, variant).verdict == "clean"


def test_what_is_summed_over_one_batch_s_ranks_is_told_by_their_axis_and_not_by_the_loss(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "again").findings
    assert (finding.code, finding.factor.expression, finding.num_parameters) == ("GS102", "tp", 2)
    assert finding.factor.observed == pytest.approx(2.0)
    assert "The loss is multiplied" not in finding.explanation
    assert finding.fix.startswith("Leave these parameters out of this sum")
    assert line_of(finding).endswith("# again")


def test_an_average_is_told_by_the_axis_of_its_group(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "averaged").findings
    assert (finding.code, finding.factor.expression) == ("GS101", "1/cp")
    assert line_of(finding).endswith("# averaged")


def test_a_line_that_counts_the_tokens_of_some_ranks_is_told_with_them(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "counted").findings
    assert (finding.code, finding.factor.expression) == ("GS305", "num_tokens/N_h")
    assert "divides by N_h, the tokens of the group (data ranks 0, 1 | 2, 3) of the rank" in finding.explanation
    assert "over all ranks" in finding.fix
    assert line_of(finding).endswith("# counted")


def test_what_is_lacking_beside_an_average_is_told_apart_from_it(tmp_path: Path) -> None:
    """The sum that is missing would have divided by nothing, as it does with others: the average alone is too much."""
    lacking, averaged = sorted(trained(tmp_path, "left out").findings, key=lambda finding: finding.num_parameters)
    assert (lacking.code, lacking.num_parameters) == ("GS103", 2)
    assert (averaged.code, averaged.factor.expression, averaged.num_parameters) == ("GS101", "1/dp_replicate", 6)


def test_a_sum_that_is_missing_is_told_where_others_are_summed_and_not_over_one_rank(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "alone").findings
    assert (finding.code, finding.num_parameters) == ("GS103", 2)
    assert line_of(finding).endswith("# of the others")
    assert finding.fix.startswith("Reduce these parameters' gradients too, as axis_words_workers.py:")


def test_what_others_are_summed_over_is_not_advised_for_what_fewer_ranks_hold(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "experts").findings
    assert finding.code == "GS103" and line_of(finding).endswith("# of the others")
    assert finding.fix.endswith("but over the ranks that hold the same ones alone (0,2 | 1,3).")


def test_a_count_over_some_ranks_is_one_finding_where_other_ranks_have_no_tokens_in_other_steps(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, "empty").findings
    assert (finding.code, finding.steps) == ("GS305", [0, 1])
    assert "the tokens of data ranks 0, 2 | 1, 3, where" in finding.explanation


def test_a_line_that_makes_others_right_divides_nothing(tmp_path: Path) -> None:
    for finding in trained(tmp_path, "doubled").findings:
        assert finding.code != "GS101" and "divides the sum" not in finding.explanation
        assert finding.factor.observed == pytest.approx(0.5)
