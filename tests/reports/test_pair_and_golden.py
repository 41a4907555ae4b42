"""Fault and fix side by side, and a scale that is frozen."""

from __future__ import annotations

import copy
import json

import pytest
from hostile import MEGABYTE, hostile_report
from sample_reports import finding, report, weight

from gradcheck_dist.diagnosis.finding import Report, UnitInfo
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports import golden
from gradcheck_dist.reports.pair import compare, side_by_side
from gradcheck_dist.reports.pair_render import as_html, as_markdown
from gradcheck_dist.trace.run import Run

Judged = tuple[Report, Run]


def test_a_fix_is_told_as_mended_with_the_norms_as_the_factor_says(faulty: Judged, fixed: Judged) -> None:
    pair = compare(faulty[0], fixed[0])
    assert pair.state == "clean"
    assert pair.headline.startswith("FIXED: GS101 double-averaging")
    assert "the first step's norm changed by x 2, as the factor 0.5 says (x 2)" in pair.facts
    rows = {row.what: (row.before, row.after, row.relation) for row in pair.rows}
    assert rows["weights, observed / expected"] == ("0.5", "1", "x 2")
    assert rows["weights off"] == ("12 of 12", "0 of 12", "")
    assert rows["gradient norm, step 1"][2] == "x 2"


def test_norms_that_moved_otherwise_are_told_and_of_a_part_of_the_parameters_nothing_is_said(faulty: Judged) -> None:
    after = report([])
    before = copy.deepcopy(faulty[0])
    old = before.metrics["grad_norm"][0]
    assert old is not None
    after.metrics = {"grad_norm": [1.5 * old], "step": before.metrics.get("step", [])}
    told = [fact for fact in compare(before, after).facts if "norm changed" in fact]
    assert told == ["the first step's norm changed by x 1.5, NOT as the factor 0.5 says (x 2)"]
    before.coverage.parameters_total += 1
    assert not any("norm changed" in fact for fact in compare(before, after).facts)


def test_nothing_is_mended_where_nothing_could_be_judged_before(fixed: Judged) -> None:
    pair = compare(report([], verdict="undetermined"), fixed[0])
    assert (pair.state, pair.headline.partition(",")[0]) == ("undetermined", "COULD NOT JUDGE the run before the fix")


def test_a_fix_that_changes_nothing_is_not_mended(faulty: Judged) -> None:
    pair = compare(faulty[0], faulty[0])
    assert (pair.state, pair.headline) == ("findings", "NOT FIXED: 1 finding left")


def test_a_fix_that_breaks_something_else_is_told() -> None:
    pair = compare(report(), report([finding(code="GS201", name="rescaled-accumulation")]))
    assert pair.headline == "NOT FIXED: 1 new finding"
    assert any(fact.startswith("new: GS201") for fact in pair.facts)


def test_two_clean_runs_show_no_fix(fixed: Judged) -> None:
    assert compare(fixed[0], fixed[0]).state == "undetermined"


def test_a_fix_that_could_not_be_judged_is_no_evidence() -> None:
    pair = compare(report(), report([], verdict="undetermined"))
    assert (pair.state, pair.headline) == ("undetermined", "COULD NOT JUDGE the run after the fix")


def test_what_else_differs_is_told() -> None:
    other = report([])
    other.run.dtype, other.run.world_size = "bfloat16", 4
    facts = compare(report(), other).facts
    assert any("dtype float32 before, bfloat16 after" in fact for fact in facts)
    assert any("world size 2 before, 4 after" in fact for fact in facts)


def test_a_norm_is_held_against_the_factor_only_where_all_parameters_are_off(faulty: Judged, fixed: Judged) -> None:
    assert any("norm changed" in fact for fact in compare(faulty[0], fixed[0]).facts)
    before = copy.deepcopy(faulty[0])
    before.findings[0].num_parameters -= 1
    assert not any("norm changed" in fact for fact in compare(before, fixed[0]).facts)


def test_several_pairs_make_one_comment_that_fits(faulty: Judged, fixed: Judged) -> None:
    huge = compare(hostile_report(MEGABYTE), hostile_report(MEGABYTE))
    text = as_markdown([compare(faulty[0], fixed[0])] * 3 + [huge] * 3)
    assert len(text.encode()) < 60_000
    assert text.count("FIXED: GS101") >= 3
    assert "<img" not in as_html([huge])


def test_norms_and_weights_of_several_meshes_stand_side_by_side(faulty: Judged, fixed: Judged) -> None:
    pairs = []
    for axes in ({"dp_replicate": 2}, {"dp_shard": 2}, {"dp_replicate": 1, "dp_shard": 2, "tp": 2}):
        before, after = copy.deepcopy(faulty[0]), copy.deepcopy(fixed[0])
        before.run.axes = after.run.axes = axes
        pairs.append(compare(before, after))
    head, *rows = side_by_side(pairs)
    assert [row[0] for row in rows] == ["dp_replicate=2", "dp_shard=2", "dp_shard=2 tp=2"]
    norms = [faulty[0].series("grad_norm")[0][1], fixed[0].series("grad_norm")[0][1]]
    assert {row[1:] for row in rows} == {("FIXED", "0.5", "1", *(f"{norm:.5g}" for norm in norms), "2")}
    assert len(head) == len(rows[0])
    text = as_markdown(pairs)
    assert text.index("| run | result |") < text.index("### ")
    assert '<th scope="row">dp_shard=2 tp=2</th><td>FIXED</td>' in as_html(pairs)
    assert side_by_side(pairs[:1]) == ()


def test_a_run_agrees_with_itself(faulty: Judged, fixed: Judged) -> None:
    for judged, _ in (faulty, fixed):
        frozen = golden.decode(golden.encode(golden.freeze(judged)).encode())
        assert golden.differences(frozen, judged) == []


def test_a_change_of_scale_is_named_with_its_factor(faulty: Judged, fixed: Judged) -> None:
    told = golden.differences(golden.freeze(fixed[0]), faulty[0])
    assert told[0] == "new finding GS101 double-averaging, factor 1/dp_replicate"
    assert told[1].startswith("weights x 0.5: 12 of 12, first step 0, all parameters, data rank 0, accumulation step 0")
    assert told[1].endswith("ratio 1 frozen, 0.5 now")
    assert any(line.startswith("grad_norm, recorded step 0:") and "(x 0.5)" in line for line in told)


def test_units_that_fell_apart_are_compared_by_their_parameters() -> None:
    before = report([], [weight(0, 0, 1.0, unit="all")], units=[UnitInfo(unit="all", parameters=["a", "b", "c"])])
    apart = [UnitInfo(unit="a, b", parameters=["a", "b"]), UnitInfo(unit="c", parameters=["c"])]
    after = report([], [weight(0, 0, 1.0, unit="a, b"), weight(0, 0, 0.25, unit="c")], units=apart)
    (told,) = golden.differences(golden.decode(golden.encode(golden.freeze(before)).encode()), after)
    assert told.startswith("weights x 0.25: 1 of 3, first step 0, c, data rank 0")


def test_a_fault_that_was_frozen_and_is_gone_is_a_change_too(faulty: Judged, fixed: Judged) -> None:
    told = golden.differences(golden.freeze(faulty[0]), fixed[0])
    assert told[0].startswith("gone finding GS101")


def test_rounding_is_no_change() -> None:
    frozen = golden.freeze(report([], [weight(0, 0, 1.0)]))
    assert golden.differences(frozen, report([], [weight(0, 0, 1.0 + 5e-5)])) == []
    assert golden.differences(frozen, report([], [weight(0, 0, 1.001)])) != []


def test_weights_that_come_and_go_are_told() -> None:
    frozen = golden.freeze(report([], [weight(0, 0, 1.0), weight(0, 1, 1.0)]))
    told = golden.differences(frozen, report([], [weight(0, 0, 1.0), weight(1, 0, 1.0)]))
    assert "1 weight fewer than frozen" in told
    assert "1 weight more than frozen" in told


def test_what_can_no_longer_be_identified_or_is_no_longer_recorded_is_told() -> None:
    before = report([], [weight(0, 0, 1.0), weight(0, 1, 1.0)], metrics={"grad_norm": [1.0], "loss": [2.0]})
    told = golden.differences(golden.freeze(before), report([], [weight(0, 0, 1.0), weight(0, 1, None)]))
    assert told[0].startswith("weights could be identified only once: 1 of 2, first step 0, all, data rank 0")
    assert told[1:] == ["loss is no longer recorded", "grad_norm is no longer recorded"]


def test_the_coarser_of_two_formats_says_what_rounding_is() -> None:
    frozen = golden.freeze(report([], [weight(0, 0, 1.0)]))
    off = [weight(0, 0, 1.002)]
    assert golden.differences(frozen, report([], off, tolerance=1e-3)) == []
    assert golden.differences(golden.freeze(report([], off, tolerance=1e-3)), report([], [weight(0, 0, 1.0)])) == []


def test_many_differences_are_counted_and_not_listed() -> None:
    frozen = golden.freeze(report([], [weight(0, k, 1.0) for k in range(60)]))
    told = golden.differences(frozen, report([], [weight(0, k, 2.0 + k) for k in range(60)]))
    assert len(told) == golden.MAX_TOLD + 1
    assert told[-1] == "and 40 more differences"


def test_what_could_not_be_judged_freezes_nothing() -> None:
    with pytest.raises(GradcheckError, match="no loss was seen") as caught:
        golden.freeze(report([], verdict="undetermined", reasons=["no loss was seen"]))
    assert caught.value.code == "E705"


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b'{"golden_schema_version": 1}', b"[" * 100_000])
def test_what_is_no_golden_file_is_refused(data: bytes) -> None:
    with pytest.raises(GradcheckError, match=r"scale\.json is no golden file") as caught:
        golden.decode(data, "scale.json")
    assert caught.value.code == "E704"


def test_a_golden_file_of_another_version_is_refused() -> None:
    content = json.loads(golden.encode(golden.freeze(report([]))))
    content["golden_schema_version"] = 2
    with pytest.raises(GradcheckError, match="its version is 2"):
        golden.decode(json.dumps(content).encode())
