"""Ranks that reduce gradients of tensors which are no copies are told by a few values of the parameters."""

from __future__ import annotations

import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Exchange, ParamSet, Reduce

TRAINER = Trainer(root=global_mean(), op="sum", data_ranks=2)
EXPERT = "layers.0.weight"
Values = dict[str, np.ndarray]


def draw(seed: int, num: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=num).astype(np.float32)


def judged(of_rank: list[Values], trainer: Trainer = TRAINER, left: list[Values] | None = None) -> Report:
    """`of_rank`: what each rank holds of its parameters at the begin of the step, and (`left`) at its end."""
    world = World(replace(trainer, data_ranks=len(of_rank)))
    run = world.run()
    for rank, values in enumerate(of_rank):
        for name, first in values.items():
            last = (left or of_rank)[rank][name]
            id = world.ranks[rank].ids[name]
            run.ranks[rank].param_values |= {(id, False): first, (id, True): last}
    return diagnose(run)


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


COPIES: Values = {"embed.weight": draw(1), EXPERT: draw(2), "norm.weight": np.ones(16, np.float32)}
OTHER_EXPERT = COPIES | {EXPERT: draw(3)}


def test_copies_are_left_alone_and_what_drifted_apart_a_little_too() -> None:
    drifted = {name: values + 0.01 * draw(9) for name, values in COPIES.items()}
    assert judged([COPIES, COPIES]).verdict == judged([COPIES, drifted]).verdict == "clean"


def test_an_expert_that_is_reduced_over_the_world_is_found() -> None:
    report = judged([COPIES, OTHER_EXPERT])
    (finding,) = report.findings
    assert (finding.code, finding.num_parameters, finding.ranks) == ("GS105", 1, [0, 1])
    assert finding.first_event is not None and finding.first_event.kind == "reduce"
    assert "0 | 1" in finding.pattern and EXPERT in finding.explanation and "the other 1" in finding.explanation


def test_the_ranks_that_hold_one_shard_are_named() -> None:
    (finding,) = judged([COPIES, OTHER_EXPERT, COPIES, OTHER_EXPERT]).findings
    assert finding.pattern.endswith("0,2 | 1,3")


def test_ranks_that_began_with_models_of_their_own_are_found() -> None:
    apart = {"embed.weight": draw(4), EXPERT: draw(5), "norm.weight": np.ones(16, np.float32)}
    (finding,) = judged([COPIES, apart]).findings
    assert (finding.code, finding.num_parameters) == ("GS106", 2)  # a norm's ones tell nothing


def test_shards_that_are_reduced_once_more_by_hand_are_parts_of_one_tensor_and_no_models_apart() -> None:
    world = World(replace(TRAINER, impl="fsdp"))
    run = world.run()
    for rank, process in enumerate(world.ranks):
        for name, id in process.ids.items():
            run.ranks[rank].param_values |= {(id, end): draw(zlib.crc32(f"{name}{rank}".encode())) for end in (0, 1)}
        last = next(event for event in reversed(run.ranks[rank].events) if isinstance(event, Reduce))
        again = msgspec.structs.replace(last, impl="all_reduce", seq=last.seq, wrapper=None)
        run.ranks[rank].events.append(again)
    assert {"GS105"} <= set(codes(diagnose(run))) and "GS106" not in codes(diagnose(run))


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ([COPIES, OTHER_EXPERT], [COPIES, COPIES]),  # perturbed during the step, or made equal in it
        ([COPIES, COPIES], [COPIES, OTHER_EXPERT]),  # each rank has stepped its part (ZeRO-1), and broadcasts it next
    ],
)
def test_what_differs_for_a_while_only_is_meant(first: list[Values], last: list[Values]) -> None:
    assert judged(first, left=last).verdict == "clean"


def test_zeros_and_ones_tell_nothing() -> None:
    constant: Values = {"embed.weight": np.zeros(16, np.float32), EXPERT: np.ones(16, np.float32)}
    assert codes(judged([constant, constant | {EXPERT: np.zeros(16, np.float32)}])) == []


def test_shards_and_what_is_not_reduced_over_these_ranks_are_left_alone() -> None:
    sharded = replace(TRAINER, impl="fsdp", op="avg", root=global_mean(2))
    assert codes(judged([COPIES, OTHER_EXPERT], sharded)) == []
    hsdp = replace(sharded, impl="hsdp", replicas=2, data_ranks=4, root=global_mean(4))
    assert codes(judged([COPIES, OTHER_EXPERT, COPIES, OTHER_EXPERT], hsdp)) == []  # replicas are 0,2 and 1,3
    assert codes(judged([COPIES, COPIES, OTHER_EXPERT, OTHER_EXPERT], hsdp)) == ["GS105"]


def test_experts_under_names_of_their_own_are_matched_by_the_collective() -> None:
    world = World(TRAINER)
    run = world.run()
    for rank, trace in run.ranks.items():
        one_by_one = []
        for event in trace.events:
            if not isinstance(event, Reduce):
                one_by_one.append(event)
                continue
            for id in trace.params:
                trace.add([ParamSet(id=100 + id, params=(id,))])
                one_by_one.append(Reduce(impl="all_reduce", op="sum", group=(0, 1), params=100 + id,
                                         seq=event.seq, t_ns=0, step=0, site=event.site))  # fmt: skip
        trace.events[:] = one_by_one
        for id, param in list(trace.params.items()):
            if param.name == EXPERT:
                trace.params[id] = msgspec.structs.replace(param, name=f"experts.{rank}.weight")
            values = (COPIES, OTHER_EXPERT)[rank][param.name]
            trace.param_values |= {(id, False): values, (id, True): values}
    (finding,) = diagnose(run).findings
    assert finding.code == "GS105" and "The gradients of experts.0.weight are" in finding.explanation


@pytest.mark.parametrize(
    ("places", "ranks", "verdict"),
    [
        ({EXPERT: 1}, (0, 1), "undetermined"),  # alone between two exchanges: an expert, drawn from the same seed
        ({EXPERT: 1, "norm.weight": 1}, (0, 1), "findings"),  # beside what is reduced: a copy
        ({EXPERT: 1}, (0, 2), "findings"),  # its copy is on a rank with which nothing is exchanged
        ({}, (), "findings"),
    ],
)
def test_experts_of_one_seed_need_no_reduction(places: dict[str, int], ranks: tuple[int, ...], verdict: str) -> None:
    world = World(replace(TRAINER, not_reduced=frozenset({EXPERT})))
    run = world.run()
    for rank, trace in run.ranks.items():
        trace.exchanges.update({id: (places.get(name, 0), ranks) for name, id in world.ranks[rank].ids.items()})
    report = diagnose(run)
    assert report.verdict == verdict
    assert codes(report) == (["GS103"] if verdict == "findings" else [])


@pytest.mark.parametrize(
    ("told", "began", "verdict"),
    [
        (True, (7, 7), "undetermined"),  # one seed
        (True, (7, 8), "clean"),  # an expert of each rank's own, by its values
        (False, (7, 7), "findings"),
    ],
)
def test_experts_of_one_seed_are_told_by_their_modules(told: bool, began: tuple[int, ...], verdict: str) -> None:
    world = World(replace(TRAINER, not_reduced=frozenset({EXPERT})))
    run = world.run()
    for rank, trace in run.ranks.items():
        id = world.ranks[rank].ids[EXPERT]
        trace.params[id] = msgspec.structs.replace(trace.params[id], expert=told, fingerprint=began[rank])
    report = diagnose(run)
    assert codes(report) == (["GS103"] if verdict == "findings" else [])
    assert report.verdict == verdict
    assert any("allreduce = False" in reason for reason in report.reasons) is (verdict == "undetermined")


@pytest.mark.parametrize(
    ("behind", "followed", "verdict"),
    [
        (1, True, "findings"),  # what comes back through the exchanges was looked at: nothing divides it
        (1, False, "undetermined"),  # nobody saw what comes back
        (0, False, "findings"),  # nothing is exchanged behind its module
    ],
)
def test_experts_of_their_own_that_nobody_divides_are_found_where_what_comes_back_was_seen(
    behind: int, followed: bool, verdict: str
) -> None:
    """Other ranks' tokens come to an expert by all-to-all, and count as its own rank's; DDP averages all the rest."""
    world = World(replace(TRAINER, op="avg", root=global_mean(2), not_reduced=frozenset({EXPERT})))
    run = world.run()
    values = np.tile(draw(1, 4), 4)  # what goes in comes out, and so does the gradient
    exchange = Exchange(
        seq=0, t_ns=0, step=0, accumulation_step=0, microbatch=0, function="Dispatch", group=(0, 1), index=0,
        input_counts=(2, 2), output_counts=(2, 2), values=values.tobytes(), collectives=("all_to_all_single",),
    )  # fmt: skip
    for rank, trace in run.ranks.items():
        ids = world.ranks[rank].ids
        trace.params[ids[EXPERT]] = msgspec.structs.replace(trace.params[ids[EXPERT]], fingerprint=7 + rank)
        places = {"embed.weight": 0, EXPERT: 1, "norm.weight": 1 + behind}
        trace.exchanges.update({ids[name]: (place, (0, 1)) for name, place in places.items()})
        if followed:
            trace.events.insert(0, exchange)
    report = diagnose(run)
    assert report.verdict == verdict and not any("began alike" in reason for reason in report.reasons)
    assert [finding.factor.observed for finding in report.findings] == pytest.approx([2.0] * (verdict == "findings"))
    assert any("which may divide it" in reason for reason in report.reasons) is (verdict == "undetermined")


@pytest.mark.parametrize(("partitioned", "codes_found"), [(True, ["GS105"]), (None, [])])
def test_parts_of_a_bias_that_began_as_zeros_are_told_by_their_module(
    partitioned: bool | None, codes_found: list[str]
) -> None:
    """A column-parallel layer's bias that is marked for the sum over sequence-parallel ranks."""
    world = World(TRAINER)
    run = world.run()
    for rank, trace in run.ranks.items():
        weight, bias = (world.ranks[rank].ids[name] for name in (EXPERT, "norm.weight"))
        began = {weight: 7 + rank, bias: zlib.crc32(bytes(4 * trace.params[bias].num_positions))}
        for id, fingerprint in began.items():
            told = {"fingerprint": fingerprint, "partitioned": partitioned, "dtype": "float32"}
            trace.params[id] = msgspec.structs.replace(trace.params[id], **told)
        trace.add([ParamSet(id=100, params=(bias,))])
        trace.events[:] = [
            msgspec.structs.replace(event, params=100) if isinstance(event, Reduce) else event for event in trace.events
        ]
        trace.params[bias] = msgspec.structs.replace(trace.params[bias], name="layers.0.bias")
    assert [one.code for one in diagnose(run).findings if "layers.0.bias" in one.explanation] == codes_found
