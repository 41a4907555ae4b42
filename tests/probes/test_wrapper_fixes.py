"""What DDP leaves unreduced is told with the fix of its own cause."""

from __future__ import annotations

import pytest
from wrapped_workers import VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("wrapped")
    launch("wrapped_workers:run", (str(folder),), 2, timeout_s=100)
    return {variant: diagnose_run(folder / variant) for variant in VARIANTS}


@pytest.mark.parametrize(
    ("variant", "begins"),
    [
        ("backward again", "Call backward() once behind each forward"),
        ("backward again in unequal passes", "Call backward() once behind each forward"),
        ("bias outside", "Make these parameters part of the wrapped module"),
        ("no_sync", "Let the last backward of the step reduce: leave no_sync()"),
        ("past the wrapper", "Let the last backward of the step reduce: compute gradients through the wrapped module"),
        ("part left out", "Let the last backward of the step reduce: leave no trained parameter of it out"),
        ("replicate, never in sync", "Let the last backward of the step reduce: leave no_sync()"),
        ("one wrapper out of sync", "Let the last backward of the step reduce: leave no_sync()"),
        ("idle hook", "Let the hook all-reduce its bucket and return the result"),
    ],
)
def test_the_fix_is_that_of_the_cause(reports: dict[str, Report], variant: str, begins: str) -> None:
    told = [finding.fix for finding in reports[variant].findings if finding.code == "GS103"]
    assert len(told) == 1 and told[0].startswith(begins)


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("no_sync", "it was told not to"),
        ("past the wrapper", "the model was called past it"),
        ("part left out", "it waits for a parameter that the pass left out"),
    ],
)
def test_why_the_wrapper_did_not_reduce_is_told(reports: dict[str, Report], variant: str, why: str) -> None:
    (told,) = (finding.explanation for finding in reports[variant].findings if finding.code == "GS103")
    assert f"(the wrapper did not reduce in this pass: {why})" in told


@pytest.mark.parametrize("variant", ["backward again", "backward again in unequal passes"])
def test_a_pass_that_goes_backward_again_is_found_besides(reports: dict[str, Report], variant: str) -> None:
    """Its reduction is missing on both ranks, though one of them holds what the other lacks."""
    told = {finding.code: finding.ranks for finding in reports[variant].findings}
    assert told == {"GS103": [0, 1], "GS403": [0, 1]} and len(reports[variant].findings) == 2
