"""Parameters that hold nothing but while they are used (DeepSpeed's ZeRO 3): what they are is known when their gradient
arrives, where this rank's part lies when the optimizer reads, and their gradients in a buffer in parts of all ranks."""

from __future__ import annotations

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

TWICE = ("findings", [("GS101", "1/world_size", [0, 1, 2])])
CLEAN: tuple[str, list[tuple[str, str, list[int]]]] = ("clean", [])
EXPECTED = {
    "right": CLEAN,
    "constants": CLEAN,
    "groups, constants": CLEAN,
    "buckets": CLEAN,
    "clipped": CLEAN,
    "clipped, few tokens": CLEAN,  # some passes have nothing in any row of the embedding that is sampled
    "averaged twice": TWICE,
    "groups, constants, averaged twice": TWICE,
    "buckets, averaged twice": TWICE,
    "clipped, averaged twice": TWICE,
    "clipped, few tokens, averaged twice": TWICE,
}
IN_BACKWARD = {"buckets, averaged twice"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("zero3")
    results = launch("zero3_workers:run", (list(EXPECTED), str(folder)), 3, timeout_s=90)
    for of_rank in results:
        assert all(bare == recorded for bare, recorded in of_rank)
    return {variant: diagnose(read_run(folder / variant)) for variant in EXPECTED}


@pytest.mark.parametrize("variant", EXPECTED)
def test_parameters_that_are_whole_only_while_they_are_used_are_judged(
    reports: dict[str, Report], variant: str
) -> None:
    report = reports[variant]
    found = [(finding.code, finding.factor.expression, finding.steps) for finding in report.findings]
    assert (report.verdict, found) == EXPECTED[variant], report.reasons
    assert report.coverage.parameters_total == 7  # no part counts as a parameter of its own
    assert report.coverage.parameters_observed >= 3  # biases and norms have too few elements


@pytest.mark.parametrize("variant", [name for name in EXPECTED if "twice" in name])
def test_a_division_in_front_of_the_sum_is_told_at_its_line(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert finding.first_event is not None and finding.first_event.file is not None
    if variant in IN_BACKWARD:  # nobody watches lines inside of a backward pass
        assert finding.first_event.kind == "backward" and "what is summed over 3 ranks" in finding.explanation
    else:
        assert finding.first_event.file.endswith("zero3_workers.py") and finding.first_event.kind == "grad_write"


def test_a_clip_that_acts_is_told_by_the_norm_that_it_leaves(reports: dict[str, Report]) -> None:
    for variant in (name for name in EXPECTED if "clipped" in name):
        assert "clipped by hand to norm 0.05" in " ".join(reports[variant].coverage.notes), variant
