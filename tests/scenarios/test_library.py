"""Every file of the scenario library on real ranks: found exactly as written, each twin clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.scenarios.jobs import Overrides
from gradcheck_dist.scenarios.runner import run_scenario
from gradcheck_dist.scenarios.schema import library, load


def check(name: str, overrides: Overrides, folder: Path) -> None:
    result = run_scenario(load(name), overrides, keep=folder)
    assert result.error is None
    wrong = {variant.variant: variant.mismatch for variant in result.report.variants if not variant.as_expected}
    assert wrong == {}
    assert result.exit_code == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", library())
def test_a_scenario_is_found_exactly_as_its_file_says(name: str, tmp_path: Path) -> None:
    check(name, Overrides(), tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("ddp-accum", Overrides(nproc=4, accum=4)),
        ("ddp-accum", Overrides(nproc=3, accum=2, steps=2, seed=5)),
        ("ddp-accum", Overrides(dtype="bfloat16")),
        ("pp-accum", Overrides(microbatches=4)),
        ("pp-accum", Overrides(accum=2, steps=2, dtype="bfloat16")),
        ("token-imbalance", Overrides(nproc=3, accum=4, seed=11)),
    ],
    ids=str,
)
def test_a_scenario_holds_for_other_sizes(name: str, overrides: Overrides, tmp_path: Path) -> None:
    check(name, overrides, tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.library
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", library())
def test_a_scenario_holds_for_another_seed(name: str, tmp_path: Path) -> None:
    check(name, Overrides(seed=3), tmp_path / "runs")
