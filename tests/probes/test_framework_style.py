"""What large frameworks do and no plain loop does: token losses from a function of their own, the autograd engine
started by hand, divisions by tokens behind the reduction, shards of parameters that are all ones."""

from __future__ import annotations

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

EXPECTED = {
    "right": ("clean", []),
    "mean": ("findings", [("GS303", "n_c^-1")]),
    "own tokens": ("findings", [("GS305", "num_tokens/N_r")]),
    "mean of sums, own tokens": ("findings", [("GS305", "num_tokens/N_r")]),
    "coalesced": ("clean", []),
    "coalesced twice": ("findings", [("GS102", "world_size")]),
}
SHARED = {
    "shared": ("clean", []),
    "kept": ("clean", []),
    "shared, averaged twice": ("findings", ["1/world_size"]),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("frameworks")
    results = launch("framework_workers:run", (list(EXPECTED), str(folder)), 2, timeout_s=90)
    for of_rank in results:
        assert all(bare == recorded for bare, recorded in of_rank)
    return {variant: diagnose(read_run(folder / variant)) for variant in EXPECTED}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("shared")
    results = launch("framework_workers:run_shared", (list(SHARED), str(folder)), 2, timeout_s=90)
    for of_rank in results:
        assert all(bare == recorded for bare, recorded in of_rank)
    return {variant: diagnose(read_run(folder / variant)) for variant in SHARED}


@pytest.mark.parametrize("variant", SHARED)
def test_parameters_that_another_rank_steps_are_judged_there(shared: dict[str, Report], variant: str) -> None:
    report = shared[variant]
    found = [finding.factor.expression for finding in report.findings]
    assert (report.verdict, found) == SHARED[variant], report.reasons
    assert report.coverage.parameters_observed == 4


@pytest.mark.parametrize("variant", EXPECTED)
def test_a_trainer_of_this_style_is_judged(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    found = [(finding.code, finding.factor.expression) for finding in report.findings]
    assert (report.verdict, found) == EXPECTED[variant], report.reasons
    assert report.coverage.parameters_observed == 8
    if variant == "mean":
        event = report.findings[0].first_event
        assert event is not None
        assert (event.kind, event.function) == ("loss", "train")
