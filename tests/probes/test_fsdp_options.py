"""FSDP2 with options that few trainers set is judged like any other, and told what to set instead."""

from __future__ import annotations

import pytest
from fsdp_option_workers import PASSES, VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up

FACTOR = "set_gradient_divide_factor(2) on every FSDP module"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("options")
    launch("fsdp_option_workers:run", (str(folder),), 2, timeout_s=100)
    return {variant: diagnose_run(folder / variant) for variant in VARIANTS}


@pytest.mark.parametrize("variant", ["unsharded by hand", "divided by four, loss multiplied by four"])
def test_right_numbers_are_clean(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert report.verdict == "clean", report.reasons
    assert report.coverage.parameters_observed == report.coverage.parameters_total and not report.coverage.problems


def test_parameters_that_were_first_seen_unsharded_are_judged(reports: dict[str, Report]) -> None:
    (finding,) = reports["unsharded by hand, loss not multiplied"].findings
    assert (finding.code, finding.num_parameters) == (
        "GS101",
        reports["unsharded by hand"].coverage.parameters_total,
    )


def test_a_module_that_is_out_of_sync_is_told_to_reduce(reports: dict[str, Report]) -> None:
    (finding,) = reports["one module out of sync"].findings
    assert (finding.code, finding.factor.observed) == ("GS103", 0.0)
    assert "set_requires_gradient_sync(True) on every module that it was turned off for" in finding.fix


@pytest.mark.parametrize(("variant", "steps"), [("divided by four", [0, 1]), ("divided by four in a step", [1])])
def test_a_divisor_that_is_no_number_of_ranks_is_told_at_the_reduction(
    reports: dict[str, Report], variant: str, steps: list[int]
) -> None:
    assert PASSES not in (2, 4)
    (finding,) = reports[variant].findings
    assert (finding.code, finding.steps) == ("GS104", steps)
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-4)
    assert finding.first_event is not None and finding.first_event.kind == "reduce"
    assert FACTOR in finding.fix


def test_what_a_hook_does_behind_the_reduction_is_looked_for_there(reports: dict[str, Report]) -> None:
    (finding,) = reports["halved by a hook"].findings
    assert (finding.code, finding.num_parameters) == ("GS000", reports["unsharded by hand"].coverage.parameters_total)
    assert finding.factor.observed == pytest.approx(0.5, rel=1e-4)
    assert "register_post_accumulate_grad_hook, which runs behind FSDP2's reduction" in finding.fix
