"""Ratios of curves: which stand, which drift, which have a name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from logs import curves
from typer.testing import CliRunner

from gradcheck_dist.cli.main import build
from gradcheck_dist.compare import comparison
from gradcheck_dist.compare.comparison import Metric, compare, explanations, parse_axes
from gradcheck_dist.compare.render import headline
from gradcheck_dist.compare.sources import Source
from gradcheck_dist.compare.statistics import Aligned, align_by_tokens, ratio, seen_tokens, student_t
from gradcheck_dist.errors import GradcheckError


def source(name: str, **settings: float) -> Source:
    made = curves(**settings)  # type: ignore[arg-type]
    return Source(name, {role.replace("num_", ""): dict(enumerate(values)) for role, values in made.items()}, {})


def norm_of(test: Source, axes: dict[str, float]) -> Metric:
    return compare(source("control"), [test], axes).tests[0].metrics[0]


def test_a_constant_factor_gets_its_name_in_spite_of_noise_and_spikes() -> None:
    metric = norm_of(source("pp", factor=0.1, seed=1), {"accum": 10, "pp": 2})
    assert metric.state == "factor"
    assert metric.ratio
    assert metric.ratio.value == pytest.approx(0.1, rel=0.01)
    assert metric.ratio.num_outliers > 0
    assert [one.expression for one in metric.names][:1] == ["1/accum"]
    assert metric.text == "1/accum"


def test_two_names_that_fit_are_both_told_with_the_run_that_tells_them_apart() -> None:
    metric = norm_of(source("ddp", factor=0.25, seed=1), {"dp": 4, "accum": 4, "pp": 2})
    assert metric.text.startswith("1/accum or 1/dp")
    assert metric.text.endswith("run with accum=3 to tell")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("factor", [1.0, 0.5, 4.0, 0.125])
def test_the_band_holds_the_truth(seed: int, factor: float) -> None:
    control, test = curves(seed=100 + seed), curves(seed=200 + seed, factor=factor)
    found = ratio(Aligned(np.arange(300.0), control["grad_norm"], test["grad_norm"]))
    assert found
    assert not found.is_drifting
    # 95 % of 48 may miss the band once or twice; none misses it by half.
    assert abs(np.log(found.value / factor)) < 2.0 * found.half
    assert found.half < 0.02


def test_jobs_that_coincide_are_the_same_and_exit_0() -> None:
    found = compare(source("control"), [source("ddp", seed=1), source("fsdp", seed=2)], {"dp": 4})
    assert [metric.state for test in found.tests for metric in test.metrics] == ["same"] * 6
    assert found.exit_code == 0
    assert headline(found) == "SAME: 2 tests and control coincide", "two runs may be wrong alike"


def test_a_drift_is_called_a_drift_and_no_factor() -> None:
    metric = norm_of(source("cp", drift=0.7, seed=1), {"dp": 2})
    assert metric.state == "drift"
    assert "changes by +" in metric.text
    assert metric.names == ()


def test_a_drift_that_begins_at_a_factor_names_it() -> None:
    metric = norm_of(source("sgd", factor=0.25, drift=0.7, seed=1), {"dp": 4})
    assert metric.state == "drift"
    assert metric.text.startswith("begins at 0.2")
    assert "= 1/dp, then drifts by +" in metric.text


def test_few_points_drift_nowhere() -> None:
    found = ratio(Aligned(np.arange(4.0), np.ones(4), np.array([0.5, 0.49, 0.52, 0.53])))
    assert found
    assert not found.is_drifting
    assert abs(np.log(found.value / 0.5)) < found.half


def test_a_norm_that_is_off_under_a_loss_that_is_not_gets_the_reason() -> None:
    found = compare(source("control"), [source("pp", factor=0.1, seed=1)], {"accum": 10})
    assert found.tests[0].notes == (comparison.WHY_THE_LOSS_LOOKS_FINE,)
    assert found.exit_code == 1


def test_a_loss_that_is_off_by_a_constant_is_told_as_such() -> None:
    found = compare(source("control"), [source("x", loss_factor=4.0, seed=1)], {"accum": 4})
    loss = found.tests[0].metrics[1]
    assert (loss.role, loss.state, loss.text) == ("loss", "factor", "accum")
    assert "logged or normalised differently" in found.tests[0].notes[0]


def test_a_number_that_no_degree_explains_stays_unexplained() -> None:
    metric = norm_of(source("x", factor=0.37, seed=1), {"dp": 4, "accum": 10})
    assert metric.names == ()
    assert "no simple product of dp=4, accum=10 explains" in metric.text


def test_a_name_that_would_fit_almost_any_number_is_no_name() -> None:
    axes = {"dp": 2.0, "accum": 6.0, "microbatches": 2.0}
    assert explanations(0.386, 0.05, axes) == []
    assert explanations(0.5, 0.05, axes)[0].value == 0.5


def test_a_root_of_a_degree_is_named_as_a_root() -> None:
    metric = norm_of(source("x", factor=8**-0.5, seed=1), {"dp": 8})
    assert metric.names[0].expression == "sqrt(1/dp)"
    assert "norm over one shard only" in metric.text


def test_without_degrees_the_way_to_a_name_is_told() -> None:
    assert "--axes dp=4" in norm_of(source("x", factor=0.25), {}).text


def test_a_band_that_is_too_wide_names_nothing() -> None:
    assert explanations(0.25, 0.5, {"dp": 4}) == []


def test_a_norm_that_was_logged_after_clipping_tells_nothing() -> None:
    clipped = source("x")
    clipped.curves["grad_norm"] = dict.fromkeys(range(300), 1.0)
    metric = norm_of(clipped, {"dp": 4})
    assert metric.state == "clipped"
    assert compare(source("control"), [clipped], {"dp": 4}).exit_code == 0
    clipped.curves["grad_norm"] |= dict.fromkeys(range(50), 0.5)  # most steps are clipped, and some were small
    assert norm_of(clipped, {"dp": 4}).state == "clipped"
    clipped.curves["grad_norm"] |= {step: 0.5 + step / 1000 for step in range(100)}
    assert norm_of(clipped, {"dp": 4}).state != "clipped"


def test_a_number_that_some_product_of_many_degrees_always_meets_gets_no_name() -> None:
    many = {"dp": 3, "pp": 5, "tp": 7, "accum": 11}
    assert explanations(3 / 5, 0.001, many)[0].expression == "dp/pp"
    assert explanations(7 / 5, 0.001, many)[0].expression == "tp/pp"
    assert explanations(15 / 11, 0.03, many) == []  # 7/5 is as near as that


def test_of_two_degrees_the_one_that_a_flag_changes_is_varied() -> None:
    metric = norm_of(source("x", factor=0.25, seed=1), {"dp": 4, "microbatches": 4})
    assert metric.text.endswith("run with microbatches=3 to tell")


def test_runs_without_a_common_step_could_not_be_compared() -> None:
    late = source("late")
    late.curves.update(
        {role: {step + 10_000: value for step, value in curve.items()} for role, curve in late.curves.items()}
    )
    found = compare(source("control"), [late], {})
    assert {metric.state for metric in found.tests[0].metrics} == {"too few"}
    assert found.tests[0].metrics[0].text.startswith("0 common points; a ratio needs 2 or more")
    assert found.exit_code == 2
    assert headline(found) == "COULD NOT COMPARE late with control"


def test_alignment_by_tokens_compares_the_same_place_of_training() -> None:
    control, test = source("control"), source("half batch")
    test.curves["tokens"] = dict.fromkeys(range(300), 500.0)
    # The test sees half the tokens a step: at its step 2 s + 1 it has seen what the control had at step s.
    test.curves["loss"] = {step: 7.0 - 0.01 * step for step in range(300)}
    control.curves["loss"] = {step: 7.0 - 0.02 * step - 0.01 for step in range(150)}
    found = compare(control, [test], {}, "tokens").tests[0]
    loss = next(metric for metric in found.metrics if metric.role == "loss")
    assert loss.ratio
    assert loss.ratio.value == pytest.approx(1.0, abs=1e-6)


def test_tokens_that_only_rise_are_a_sum_already() -> None:
    assert seen_tokens({0: 10.0, 1: 20.0, 2: 30.0}) == {0: 10.0, 1: 20.0, 2: 30.0}
    assert seen_tokens({0: 10.0, 1: 10.0, 2: 11.0}) == {0: 10.0, 1: 20.0, 2: 31.0}


def test_alignment_without_common_tokens_is_empty() -> None:
    assert len(align_by_tokens({0: 1.0}, {0: 5.0}, {0: 1.0}, {0: 50.0}).at) == 0


def test_by_tokens_needs_tokens() -> None:
    bare = Source("bare", {"loss": {0: 1.0}}, {})
    with pytest.raises(GradcheckError, match="bare has no curve of tokens") as caught:
        compare(source("control"), [bare], {}, "tokens")
    assert caught.value.code == "E914"


@pytest.mark.parametrize("text", ["dp", "dp=", "dp=x", "dp=0", "dp=-1", "1dp=2", "dp=nan", "dp=inf", "=3"])
def test_other_axes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(GradcheckError, match="--axes dp=4,pp=2,accum=10") as caught:
        parse_axes(text)
    assert caught.value.code == "E913"


def test_axes_are_names_and_numbers() -> None:
    assert parse_axes("dp=4, pp=2,accum=10") == {"dp": 4.0, "pp": 2.0, "accum": 10.0}
    assert parse_axes(None) == {}


@pytest.mark.parametrize(("freedom", "point"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)])
def test_student_s_t_is_as_in_the_tables(freedom: float, point: float) -> None:
    assert student_t(freedom) == pytest.approx(point, rel=0.01)


@pytest.mark.parametrize(
    ("name", "head"),
    [("c.html", "<!doctype html>"), ("c.md", "<!-- gradcheck -->"), ("c.json", "{"), ("c", "1 of 1 test off")],
)
def test_a_file_s_name_tells_the_format(tmp_path: Path, name: str, head: str) -> None:
    for job, scale in (("control", 1.0), ("test", 0.25)):
        rows = "".join(f"{step},{scale * (2 + step % 3)}\n" for step in range(40))
        (tmp_path / f"{job}.csv").write_text(f"step,grad_norm\n{rows}")
    words = [str(tmp_path / "control.csv"), str(tmp_path / "test.csv"), "-o", str(tmp_path / name)]
    assert CliRunner().invoke(build("compare"), words).exit_code == 1
    assert (tmp_path / name).read_text().startswith(head)
