"""Shards that began alike on all tensor-parallel ranks are told from copies by sizes, by a mark, or left open."""

from __future__ import annotations

import pytest
from beside import judged_beside
from one_seed_workers import CLEAN, NOT_SUMMED, OPEN
from shard_workers import BESIDE, FACTORS, NORMS, SCALES, VARIANTS

from gradcheck_dist.diagnosis.finding import Report


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "shard_workers:train_all", VARIANTS)


@pytest.mark.parametrize("variant", [FACTORS[0], SCALES[1], SCALES[3], NORMS[0], "bottleneck of one seed"])
def test_shards_that_began_alike_lack_no_sum(reports: dict[str, Report], variant: str) -> None:
    assert (reports[variant].verdict, reports[variant].findings) == ("clean", [])


@pytest.mark.parametrize("variant", [*FACTORS[1:], NORMS[1]])
def test_copies_among_them_do(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert (finding.code, finding.factor.exact, finding.num_parameters) == ("GS703", "1/2", 1)


@pytest.mark.parametrize("variant", [SCALES[0], SCALES[2]])
def test_vectors_that_may_be_either_are_left_open(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("of scale differ" in reason and "tensor_model_parallel" in reason for reason in report.reasons)


def test_copies_of_an_adapter_on_frozen_parts_make_no_ranks_strangers(reports: dict[str, Report]) -> None:
    report = reports[BESIDE]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert all("of out.weight differ" in reason for reason in report.reasons)


@pytest.fixture(scope="module")
def of_one_seed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "one_seed_workers:train_all", [*OPEN, *CLEAN, NOT_SUMMED])


@pytest.mark.parametrize("variant", OPEN)
def test_shards_that_nothing_tells_from_copies_accuse_nobody(of_one_seed: dict[str, Report], variant: str) -> None:
    report = of_one_seed[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert all(f"of {', '.join(OPEN[variant])} differ" in reason for reason in report.reasons), report.reasons


@pytest.mark.parametrize("variant", CLEAN)
def test_trainers_whose_gradients_are_alike_or_summed_are_clean(of_one_seed: dict[str, Report], variant: str) -> None:
    assert (of_one_seed[variant].verdict, of_one_seed[variant].findings) == ("clean", [])


def test_a_rank_whose_summand_is_zero_lacks_the_sum_as_well(of_one_seed: dict[str, Report]) -> None:
    (finding,) = of_one_seed[NOT_SUMMED].findings
    assert (finding.code, finding.num_parameters, finding.ranks) == ("GS703", 1, [0, 1])
