"""Plain copies of FSDP2's shards that an optimizer owns are the parameters: what they are given is judged."""

from __future__ import annotations

import pytest
from host_copy_workers import OF_DTENSORS, VARIANTS

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("host")
    launch("host_copy_workers:run", (str(folder),), 2, timeout_s=150)
    return {variant: diagnose_run(folder / variant) for variant in (*VARIANTS, *OF_DTENSORS)}


@pytest.mark.parametrize("variant", ["right", "bfloat16", "DTensors, right", "DTensors, bfloat16"])
def test_copies_of_shards_are_clean_where_gradients_add_up_in_them(variant: str, reports: dict[str, Report]) -> None:
    assert (reports[variant].verdict, reports[variant].reasons) == ("clean", [])
    assert reports[variant].coverage.parameters_observed == 6


@pytest.mark.parametrize(
    ("variant", "code"),
    [
        ("replaced in each pass", "GS401"),
        ("kept over steps", "GS402"),
        ("divided again", "GS000"),
        ("DTensors, kept over steps", "GS402"),
        ("DTensors, halved", "GS000"),
        ("DTensors, clipped apart", "GS601"),
    ],
)
def test_what_hooks_make_of_their_gradients_is_found(variant: str, code: str, reports: dict[str, Report]) -> None:
    (finding,) = reports[variant].findings
    assert finding.code == code
    assert finding.num_parameters >= 3  # stale values of the smallest ones do not show
