"""Parameters that are DTensors and reduced inside of autograd are judged by what each rank contributed."""

from __future__ import annotations

from pathlib import Path

import pytest
from beside import in_memory, judged_beside
from dtensor_workers import VARIANTS
from held_back import hold_back

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.diagnosis.weights.cells import COUNTED_AGAIN
from gradcheck_dist.events import Loss, LossGradient, StepEnd
from gradcheck_dist.trace.run import read_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dtensor")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Report]:
    def judge(run: Path) -> Report:
        if run.name == "all DTensors":
            folder.joinpath("run").symlink_to(run)
        return in_memory(run)

    return judged_beside(tmp_path_factory, "dtensor_workers:train_all", VARIANTS, judge=judge)


@pytest.mark.parametrize(
    "variant",
    ["sharded", "replicated", "all DTensors", "read as summands", "read as summands, averaged and multiplied"],
)
def test_what_autograd_sums_is_right(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert report.verdict == "clean"
    assert len({str(weight.contribution) for weight in report.weights}) == 4


def test_summands_over_data_ranks_that_are_summed_by_hand_as_well_leave_the_verdict_open(
    reports: dict[str, Report],
) -> None:
    """The optimizer adds up what all ranks hold, in which each contribution is as often as there are ranks."""
    report = reports["all DTensors, summed by hand"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert [reason for reason in report.reasons if COUNTED_AGAIN in reason], report.reasons
    assert "dist.all_reduce" in report.next_step


def test_losses_of_a_ranks_own_summand_leave_the_verdict_open(reports: dict[str, Report]) -> None:
    report = reports["local summands of logits"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert [reason for reason in report.reasons if "hold shards of the same parameters for the same tokens" in reason]


def test_where_no_loss_was_seen_nobody_is_accused(reports: dict[str, Report], folder: Path) -> None:
    assert reports
    run = read_run(folder / "run")
    for kind in (Loss, LossGradient):
        run = hold_back(run, kind)
    for event in (event for trace in run.ranks.values() for event in trace.events if isinstance(event, StepEnd)):
        event.num_events = 0  # nothing is lost
    report = diagnose(run)
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_what_came_from_another_ranks_summand_shares_the_fate_of_the_rest(reports: dict[str, Report]) -> None:
    report = reports["sequence parallel, clipped by local norms"]
    assert (report.verdict, report.findings) == ("undetermined", [])


def line_of(finding: Finding) -> str:
    assert finding.first_event is not None
    return Path(str(finding.first_event.file)).read_text().splitlines()[(finding.first_event.line or 0) - 1]


def test_summands_that_each_rank_clips_by_its_own_norm_are_laid_to_the_clip_and_to_no_loss(
    reports: dict[str, Report],
) -> None:
    (finding,) = reports["sequence parallel, clipped by own norms"].findings
    assert (finding.code, finding.ranks) == ("GS601", [0, 1])
    assert "grad.to_local().mul_(0.05" in line_of(finding)


def test_a_sum_of_summands_that_are_summed_once_more_is_laid_to_its_line(reports: dict[str, Report]) -> None:
    (finding,) = reports["sequence parallel, summands summed"].findings
    assert (finding.code, finding.factor.observed) == ("GS102", pytest.approx(2, rel=1e-5))
    assert "dist.all_reduce(param.grad.to_local())" in line_of(finding)


def test_one_loss_of_unequal_weights_on_ranks_that_hold_shards_is_left_open(reports: dict[str, Report]) -> None:
    assert reports["sequence parallel"].verdict == "clean"
    report = reports["sequence parallel, half the loss on a rank"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert [reason for reason in report.reasons if "give one loss of the same tokens unequal weights" in reason]
    assert "same numbers on all ranks of one model" in report.next_step


@pytest.mark.parametrize(
    "variant",
    [
        "sharded, averaged",
        "replicated, averaged",
        "read as summands, averaged",
        "read as summands, averaged and redistributed",
    ],
)
def test_what_autograd_averages_is_named_with_its_own_fix(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert finding.code == "GS101"
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-5)
    assert 'grad_placements=[Partial("sum")]' in finding.fix
    assert finding.first_event is not None
    assert (
        "loss.backward()"
        in Path(str(finding.first_event.file)).read_text().splitlines()[(finding.first_event.line or 0) - 1]
    )


def test_of_data_ranks_what_is_summed_at_the_parameters_needs_no_declaration(reports: dict[str, Report]) -> None:
    assert reports["computed, summed by hand"].verdict == "clean"


@pytest.mark.parametrize("variant", ["local", "local between copies"])
def test_local_parts_with_declared_gradients_are_clean(reports: dict[str, Report], variant: str) -> None:
    assert reports[variant].verdict == "clean"
    assert not [note for note in reports[variant].coverage.notes + reports[variant].coverage.notes if "probe" in note]
    assert "GS802" in reports[variant].rules.passed


@pytest.mark.parametrize("variant", ["gathered tokens, declared", "own tokens again"])
def test_experts_on_gathered_tokens_are_clean(reports: dict[str, Report], variant: str) -> None:
    assert reports[f"experts, {variant}"].verdict == "clean"


def test_what_data_ranks_gather_and_take_one_gradient_of_loses_others_losses(reports: dict[str, Report]) -> None:
    (finding,) = reports["experts, gathered tokens"].findings
    assert (finding.code, finding.severity) == ("GS802", "warning")
    assert "to_local(grad_placements=[Partial()])" in finding.fix
    assert finding.first_event is not None
    file, line = str(finding.first_event.file), finding.first_event.line or 0
    assert "full_tensor(grad_placements=summands)" in Path(file).read_text().splitlines()[line - 1]


@pytest.mark.parametrize(
    ("variant", "code", "fix"),
    [
        ("not declared", ".to_local(grad_placements=summands)", "to_local(grad_placements=[Partial()])"),
        ("whole declared summed", ".to_local(grad_placements=self.declared)", "leave grad_placements out"),
        ("summands declared copies", "DTensor.from_local(y", "declare Partial()"),
    ],
)
def test_what_is_declared_of_a_local_part_is_held_against_what_arrives(
    reports: dict[str, Report], variant: str, code: str, fix: str
) -> None:
    (finding,) = reports[f"local, {variant}"].findings
    assert (finding.code, finding.severity) == ("GS802", "error")
    assert fix in finding.fix
    assert finding.first_event is not None
    file, line = str(finding.first_event.file), finding.first_event.line or 0
    assert code in Path(file).read_text().splitlines()[line - 1]


def test_copies_that_differ_because_of_a_sum_that_is_lacking_behind_them_are_no_fault_of_their_own(
    reports: dict[str, Report],
) -> None:
    (finding,) = reports["local between copies, not declared"].findings
    assert (finding.code, finding.severity) == ("GS802", "error")
    assert finding.first_event is not None
    lines = Path(str(finding.first_event.file)).read_text().splitlines()
    assert ".to_local(grad_placements=summands)" in lines[(finding.first_event.line or 0) - 1]
    line = next(
        number
        for number, text in enumerate(lines, 1)
        if text.endswith("redistribute(placements=[Replicate()]).to_local()")
    )
    assert f"differs at dtensor_workers.py:{line}, too" in finding.explanation
