"""The degrees of the mesh by what process groups are called, where that fits what was seen."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from msgspec.structs import replace
from random_trainers import global_mean
from simulator import Trainer, World
from tiny_runs import write_run

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.weights.mesh import infer_mesh
from gradcheck_dist.events import NamedGroup
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.records import Plan
from gradcheck_dist.reports.along import mesh_places
from gradcheck_dist.trace.run import read_run

BY_HAND = Trainer(global_mean(), op="sum", impl="all_reduce", data_ranks=4)
FSDP = Trainer(global_mean(4.0), impl="fsdp", data_ranks=4)


def judged(trainer: Trainer, *dims: tuple[str, int], inside: str = "") -> Report:
    """`dims`: what the groups of each dimension of a mesh are called and how large they are, outermost first. `inside`:
    the only rank that knows them."""
    run = World(trainer).run()
    places = list(itertools.product(*(range(size) for _, size in dims)))
    for rank, trace in run.ranks.items():
        for index, (name, _) in enumerate(dims):
            around = [(place[:index], place[index + 1 :]) for place in places]
            group = tuple(other for other in range(len(places)) if around[other] == around[rank])
            if len(group) > 1 and inside in ("", str(rank)):
                trace.named_groups[name, group] = NamedGroup(name=name, group=group)
    return diagnose(run)


def degrees(report: Report) -> dict[str, int]:
    return {axis: degree for axis, degree in report.run.axes.items() if degree > 1}


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ([("mesh_dp", 2), ("mesh_cp", 2)], {"dp_replicate": 2, "cp": 2}),
        ([("mesh_replicate", 2), ("mesh_shard", 2)], {"dp_replicate": 2, "dp_shard": 2}),
        ([("DATA_PARALLEL_GROUP", 2), ("CONTEXT_PARALLEL_GROUP", 2)], {"dp_replicate": 2, "cp": 2}),
        ([("mesh_pipeline", 1), ("mesh_sp", 4)], {"cp": 4}),
        ([("mesh_dp", 2), ("mesh_mine", 2)], {}),
        ([("mesh_cp", 2), ("undefined", 2)], {}),
    ],
)
def test_groups_are_axes_by_their_names_where_these_account_for_all_ranks(
    dims: list[tuple[str, int]], expected: dict[str, int]
) -> None:
    report = judged(BY_HAND, *dims)
    assert (degrees(report), report.verdict) == (expected, "clean")
    assert ("names of process groups" in report.run.axes_from) == bool(expected)


def test_what_a_wrapper_reduces_over_is_taken_apart() -> None:
    assert degrees(judged(FSDP)) == {"dp_shard": 4}
    assert degrees(judged(FSDP, ("mesh_dp", 2), ("mesh_cp", 2))) == {"dp_shard": 2, "cp": 2}
    assert degrees(judged(FSDP, ("mesh_unnamed", 2), ("mesh_cp", 2))) == {"dp_shard": 2, "cp": 2}
    report = judged(FSDP, ("mesh_fsdp", 4))
    assert degrees(report) == {"dp_shard": 4} and "names" not in report.run.axes_from


def test_names_that_contradict_what_was_seen_or_each_other_say_nothing() -> None:
    assert degrees(judged(FSDP, ("mesh_tp", 2), ("mesh_pp", 2))) == {"dp_shard": 4}
    assert degrees(judged(FSDP, ("mesh_dp", 2), ("mesh_cp", 2), inside="0")) == {"dp_shard": 4}
    assert degrees(judged(FSDP, ("mesh_cp", 2), ("CONTEXT_PARALLEL_GROUP", 2))) == {"dp_shard": 4}


def test_a_factor_is_called_after_the_named_axis() -> None:
    wrong = Trainer(global_mean(4.0), op="sum", impl="all_reduce", data_ranks=4)
    (plain,), (named,) = judged(wrong).findings, judged(wrong, ("mesh_tp", 1), ("mesh_cp", 4)).findings
    assert (plain.factor.expression, named.factor.expression) == ("world_size", "cp")


def test_nothing_is_placed_along_axes_of_another_order() -> None:
    assert set(mesh_places(judged(BY_HAND, ("mesh_dp", 2), ("mesh_cp", 2)))) == {"dp_replicate", "cp"}
    assert mesh_places(judged(BY_HAND, ("mesh_cp", 2), ("mesh_dp", 2))) == {}


def test_an_axis_of_which_a_rank_has_two_groups_and_another_none_is_not_known() -> None:
    run = World(BY_HAND).run()
    for rank, groups in enumerate([[(0, 1), (0, 2)], [], [(2, 3)], [(2, 3)]]):
        for axis in ("mesh_cp", "mesh_dp"):
            for group in groups if axis == "mesh_cp" else [(rank % 2, rank % 2 + 2)]:
                run.ranks[rank].named_groups[axis, group] = NamedGroup(name=axis, group=group)
    assert degrees(diagnose(run)) == {}


@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp_replicate": 3}, {"dp_shard": 2, "ep": 3}])
def test_declared_degrees_of_another_number_of_ranks_are_told_and_left_out(
    axes: dict[str, int], tmp_path: Path
) -> None:
    report = diagnose(read_run(write_run(tmp_path / "run", fault=None, declared={"axes": axes})))
    assert report.verdict == "clean"
    assert report.run.axes_from != "declared" and degrees(report) == {"dp_replicate": 2}
    [problem] = report.coverage.problems
    assert "left out" in problem and ("world size is 2" in problem or "ep=3 does not divide" in problem)


def test_declared_degrees_that_fit_are_taken(tmp_path: Path) -> None:
    report = diagnose(read_run(write_run(tmp_path / "run", fault=None, declared={"axes": {"dp_shard": 2}})))
    assert (report.run.axes_from, degrees(report), report.coverage.problems) == ("declared", {"dp_shard": 2}, [])


def test_ranks_that_do_not_exist_cannot_share_their_tokens(tmp_path: Path) -> None:
    report = diagnose(read_run(write_run(tmp_path / "run", fault=None, declared={"same_data": ((0,), (1, 2))})))
    assert report.verdict == "clean"
    assert any("--same-data names rank 2," in problem for problem in report.coverage.problems)


@pytest.mark.parametrize(
    ("places", "parts", "expected"),
    [
        ({0: 0, 1: 0, 2: 1, 3: 1}, (0, 1, 0, 1), 2),
        ({0: 0, 1: 0, 2: 0, 3: 0}, (0, 1, 2, 3), 4),
        ({0: 0, 1: 1, 2: 2, 3: 3}, (0, 1, 2, 3), 1),  # experts, or what is gathered before it is used
        ({0: 0, 1: 0, 2: 0, 3: 0}, (0, 0, 0, 0), 1),
    ],
)
def test_ranks_that_compute_one_batch_with_parts_of_parameters_are_tensor_parallel(
    places: dict[int, int], parts: tuple[int, ...], expected: int
) -> None:
    run = World(BY_HAND).run()
    for rank, trace in run.ranks.items():
        split = {plan.id: replace(plan, offset=(24 * parts[rank],), extent=(24,)) for plan in trace.plans.values()}
        shard = {100: Plan(id=100, param=0, num_values=6, offset=(6 * rank,), extent=(6,))}  # as an optimizer has it
        trace.plans = {key: plan for key, plan in split.items() if plan.param == 0} | shard
    mesh = infer_mesh(run, {}, Contributions({}, coordinate=places))
    assert mesh.axes["tp"] == expected
    assert ("parameters in parts" in mesh.rests_on) == (expected > 1)


def test_parts_for_the_sake_of_a_reduction_are_no_tensor_parallelism() -> None:
    run = World(FSDP).run()
    for rank, trace in run.ranks.items():
        trace.plans = {7: Plan(id=7, param=0, num_values=24, offset=(24 * rank,), extent=(24,))}
    events = {rank: trace.events for rank, trace in run.ranks.items()}
    mesh = infer_mesh(run, events, Contributions({}, coordinate=dict.fromkeys(range(4), 0)))
    assert (mesh.axes["dp_shard"], mesh.axes["tp"]) == (4, 1)
