"""Ranks that average their parameters and not their gradients are not accused; those that share nothing are."""

from __future__ import annotations

from pathlib import Path

import pytest
from apart_workers import RECORDED
from still_source import first_snapshot

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import Replica
from gradcheck_dist.reports.document import build
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def train(
    folder: Path,
    how: str,
    every: int,
    factor: float = 1.0,
    *,
    of_all: bool = False,
    empties: bool = True,
    equal: bool = False,
    by_pass: bool = False,
    own_seed: bool = False,
    warm: int = 0,
) -> Path:
    run, options = folder / "run", (of_all, empties, equal, by_pass, own_seed, warm)
    recorded = launch("apart_workers:train", (how, every, factor, str(run), *options), 2, timeout_s=60)
    assert recorded == launch("apart_workers:train", (how, every, factor, None, *options), 2, timeout_s=60)
    return run


@pytest.mark.parametrize(
    ("how", "every"),
    [
        ("parameters", 1),
        ("parameters", RECORDED),
        ("pseudo gradients", RECORDED + 2),
        ("neighbour", 2),
        ("elastic", 2),
        ("pickled", 1),
    ],
)
def test_averaging_parameters_is_no_missing_reduction(tmp_path: Path, how: str, every: int) -> None:
    """Also where the first average comes behind the recorded steps, or right behind the last of them."""
    run = train(tmp_path, how, every)
    report = diagnose(read_run(run))
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert f"after step {every - 1}" in reason and "on its own tokens" in reason
    assert [weight.ratio for weight in report.weights] == pytest.approx([1.0] * len(report.weights), rel=1e-4)
    assert build(diagnose_run(run)) == build(report)


@pytest.mark.parametrize(("factor", "equal", "exact"), [(0.5, False, "1/2"), (2.0, True, "2")])
def test_a_factor_beside_averaged_parameters_is_found(tmp_path: Path, factor: float, equal: bool, exact: str) -> None:
    """Also as many times as there are ranks with equally many tokens, which is no mean over a rank's own."""
    report = diagnose(read_run(train(tmp_path, "parameters", 2, factor, equal=equal)))
    assert [(finding.code, finding.factor.exact) for finding in report.findings] == [("GS303", exact)]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_means_of_means_are_told_of_each_rank_that_averages_parameters(tmp_path: Path, factor: float) -> None:
    run = train(tmp_path, "parameters", 2, factor, by_pass=True)
    (finding,) = diagnose(read_run(run)).findings
    assert finding.code == "GS301"
    assert ("accumulation_steps" in (finding.factor.expression or "")) == (factor != 1)
    assert build(diagnose_run(run)) == build(diagnose(read_run(run)))


@pytest.mark.parametrize("step", [0, 1])
def test_screens_show_each_rank_beside_its_own_tokens(tmp_path: Path, step: int) -> None:
    """As the report does, where the weight map showed others' tokens as lost."""
    view = first_snapshot(train(tmp_path, "parameters", 1), step=step).step
    assert view is not None and view.step == step
    ratios = [weight.ratio for weight in view.verdict.weights]
    assert ratios and ratios == pytest.approx([1.0] * len(ratios), rel=1e-4)


@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (0.5, ["GS000"])])
def test_losses_may_be_shares_of_a_mean_over_all_ranks_that_average_parameters(
    tmp_path: Path, factor: float, found: list[str]
) -> None:
    report = diagnose(read_run(train(tmp_path, "parameters", 1, factor, of_all=True)))
    assert [finding.code for finding in report.findings] == found
    assert any("a mean over all ranks' tokens" in reason for reason in report.reasons) == (not found)


def test_losses_over_all_ranks_tokens_are_not_at_fault_where_each_rank_drew_a_model_of_its_own(tmp_path: Path) -> None:
    """An adapter that a wrapper does not hold was told as a loss that divides by too many tokens."""
    report = diagnose(read_run(train(tmp_path, "never", 1, of_all=True, own_seed=True)))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("hold different models and share no gradient" in reason for reason in report.reasons)
    assert any("divided by the tokens of all" in reason and "left out of the wrapper" in reason
               for reason in report.reasons)  # fmt: skip


def test_losses_that_are_no_shares_are_found_where_each_rank_drew_a_model_of_its_own(tmp_path: Path) -> None:
    (finding,) = diagnose(read_run(train(tmp_path, "never", 1, 0.5, own_seed=True))).findings
    assert (finding.code, finding.factor.exact) == ("GS303", "1/2")


def test_what_rests_on_no_weight_is_found_beside_such_shares(tmp_path: Path) -> None:
    report = diagnose(read_run(train(tmp_path, "parameters", 1, of_all=True, empties=False)))
    assert [finding.code for finding in report.findings] == ["GS402"]


def test_ranks_that_share_nothing_are_accused(tmp_path: Path) -> None:
    run = read_run(train(tmp_path, "never", 1))
    assert "GS103" in {finding.code for finding in diagnose(run).findings}
    seen = [event for event in run.ranks[0].events if isinstance(event, Replica)]
    assert [(event.step, event.after) for event in seen] == [(s, a) for s in range(RECORDED) for a in (False, True)]


@pytest.mark.parametrize("every", [1, RECORDED + 1])
@pytest.mark.parametrize("how", ["decay", "logged", "by itself"])
def test_what_each_rank_does_to_its_own_parameters_is_no_average(tmp_path: Path, how: str, every: int) -> None:
    """A weight decay by hand behind the optimizer was taken for local SGD. What ranks log has more bytes, pickled, than
    a tiny model has parameters, and what goes over one rank alone brings nothing of others."""
    (finding,) = diagnose(read_run(train(tmp_path, how, every, of_all=True))).findings
    assert finding.code == "GS103"


def test_ranks_that_step_parts_and_hand_them_on_lack_a_reduction(tmp_path: Path) -> None:
    """ZeRO by hand: what makes parameters alike again is no average, and what their rank alone reads is emptied behind
    its step."""
    (finding,) = diagnose(read_run(train(tmp_path, "owner", 1, of_all=True))).findings
    assert finding.code == "GS103" and finding.first_event is not None
    assert (finding.first_event.kind, finding.num_parameters) == ("backward", 5)


@pytest.mark.parametrize(("how", "found"), [("parameters", []), ("never", ["GS103"])])
def test_ranks_may_train_apart_behind_a_warm_up(tmp_path: Path, how: str, found: list[str]) -> None:
    """Post-local SGD by hand: gradients are averaged in the first two steps, and parameters behind the fourth."""
    report = diagnose(read_run(train(tmp_path, how, 4, of_all=True, warm=RECORDED - 1)))
    assert [finding.code for finding in report.findings] == found
    assert found or (report.verdict == "undetermined" and "in step 2, and" in report.reasons[0])


def test_a_hook_that_reduces_over_some_ranks_by_its_documentation_lacks_no_reduction(tmp_path: Path) -> None:
    launch("apart_workers:train_post_local", (str(tmp_path / "run"),), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("post_localSGD_hook" in reason for reason in report.reasons)


@pytest.mark.parametrize("averaged", ["", "parameters", "copies"])
def test_an_optimizer_that_hands_on_what_it_left_in_copies_averages_nothing(tmp_path: Path, averaged: str) -> None:
    """Mixed precision by hand changes parameters by no optimizer, and was taken for local SGD."""
    run = tmp_path / "run"
    recorded = launch("apart_workers:train_copies", (averaged, str(run)), 2, timeout_s=60)
    assert recorded == launch("apart_workers:train_copies", (averaged, None), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert [finding.code for finding in report.findings][:1] == ([] if averaged else ["GS103"])
    assert any("on its own tokens" in reason for reason in report.reasons) == bool(averaged)


@pytest.mark.parametrize("read", ["buffer", "grad"])
def test_an_update_by_hand_may_read_what_was_reduced_where_it_lies(tmp_path: Path, read: str) -> None:
    """Copies that stay alike were moved by one gradient; those that part were moved by each rank's own."""
    run = tmp_path / "run"
    recorded = launch("apart_workers:train_flat", (read, str(run)), 2, timeout_s=60)
    assert recorded == launch("apart_workers:train_flat", (read, None), 2, timeout_s=60)
    report = diagnose(read_run(run))
    assert [finding.code for finding in report.findings] == (["GS103"] if read == "grad" else [])
    assert any("the result is not in .grad" in reason for reason in report.reasons) == (read == "buffer")
    assert build(diagnose_run(run)) == build(report)


@pytest.mark.parametrize("kind", ["copies", "of each rank", "one model"])
def test_models_of_inner_loops_train_apart(tmp_path: Path, kind: str) -> None:
    """Meta-learning and searches make them anew; an optimizer that is made anew makes no other model."""
    run = tmp_path / "run"
    recorded = launch("apart_workers:train_in_loops", (kind, str(run)), 2, timeout_s=60)
    assert recorded == launch("apart_workers:train_in_loops", (kind, None), 2, timeout_s=60)
    report = diagnose(read_run(run))
    codes = {finding.code for finding in report.findings}
    assert codes == ({"GS103", "GS301"} if kind == "one model" else set())
    assert any("made anew" in reason for reason in report.reasons) == (kind != "one model")
    assert build(diagnose_run(run)) == build(report)
