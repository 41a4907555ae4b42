"""The nominal and the observed ledger of simulated trainers, against the weights that the simulator knows exactly."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from random_trainers import global_mean
from simulator import Hand, Trainer, World
from trainer_families import make_case

from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.measured import measure
from gradcheck_dist.events import BEFORE, LEAF, AmpUnscale, ParamSet, Reduce, ScaleGrads, ZeroGrad
from gradcheck_dist.ledger.contributions import Contributions, collect
from gradcheck_dist.ledger.reductions import nominal_factor
from gradcheck_dist.ledger.tracks import step_data

PLAIN = Trainer(root=global_mean(), accumulation=3, sync="last", op="sum")


def ledgers(trainer: Trainer) -> tuple[World, Contributions, list[Held]]:
    world = World(trainer, seed=1)
    data = step_data(world.run(), 0)
    contributions = collect(data.events)
    return world, contributions, measure(data, contributions)


def roots(contributions: Contributions, held: Held) -> np.ndarray:
    return np.array([contributions.by_key[key].weight for key in held.replay.basis.keys], dtype=float)


def truth(world: World, held: Held) -> np.ndarray:
    weights = world.ranks[held.rank].final[held.param[1]]
    return np.array([weights[world.trainer.keys.index(key)] for key in held.replay.basis.keys])


SEMANTICS = {
    "a sum adds the ranks": {},
    "an average divides by the ranks": {"op": "avg"},
    "reducing every time multiplies what was reduced already": {"sync": "every"},
    "averaging every time changes nothing": {"op": "avg", "sync": "every"},
    "without a reduction each rank keeps its own": {"sync": "never"},
    "all but the last backward reduce": {"sync": "inverted"},
    "FSDP adds what it reduced to what it holds": {"impl": "fsdp", "sync": "every"},
    "FSDP reduces what it accumulated": {"impl": "fsdp"},
    "FSDP divides by the factor that was set": {"impl": "fsdp", "divide": 8.0},
    "HSDP reduces over both axes": {"impl": "hsdp", "data_ranks": 4, "replicas": 2, "op": "avg"},
    "HSDP leaves the replicas to the last step": {
        "impl": "hsdp", "data_ranks": 4, "replicas": 2, "op": "avg", "sync": "every", "replicas_last": True,
    },
    "HSDP sums and leaves the replicas to the last step": {
        "impl": "hsdp", "data_ranks": 6, "replicas": 3, "sync": "every", "replicas_last": True,
    },
    "scale_grads divides everything accumulated": {
        "stages": 2, "microbatches": 2, "scale_grads": True, "impl": "none", "data_ranks": 1,
    },
    "zero_grad in between empties": {"zero_between": True},
    "unscaling undoes the loss scale": {"loss_scale": 1024.0},
    "clipping is kept apart": {"clip": 0.001},
    "a parameter left out of the reduction stays local": {"not_reduced": frozenset({"norm.weight"})},
}  # fmt: skip


@pytest.mark.parametrize("changes", SEMANTICS.values(), ids=SEMANTICS)
def test_each_event_does_to_the_weights_what_it_does_in_torch(changes: dict[str, object]) -> None:
    world, contributions, measured = ledgers(replace(PLAIN, **changes))  # type: ignore[arg-type]
    assert measured
    for held in measured:
        assert held.nominal is not None and held.observed is not None
        root = roots(contributions, held)
        np.testing.assert_allclose(held.nominal * root, truth(world, held), rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(held.observed * root, truth(world, held), rtol=1e-4, atol=1e-6 * root.max())


def test_what_nobody_recorded_is_in_the_observed_ledger_only() -> None:
    world, contributions, measured = ledgers(replace(PLAIN, hands=(Hand("before_step", 0.3),)))
    for held in measured:
        assert held.nominal is not None and held.observed is not None
        np.testing.assert_allclose(held.observed, 0.3 * held.nominal, rtol=1e-4, atol=1e-9)
        np.testing.assert_allclose(held.observed * roots(contributions, held), truth(world, held), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_observed_weights_are_the_true_ones_within_their_errors(seed: int) -> None:
    case = make_case(
        ["healthy-trainers", "one-rank-scaled", "last-microbatch-scaled", "reduced-by-hand"][seed % 4], seed
    )
    world = World(case.trainer, seed)
    data = step_data(world.run(), 0)
    contributions = collect(data.events)
    for held in measure(data, contributions):
        if held.observed is None or held.stderr is None or held.param[1] == "k.bias":
            continue
        root = roots(contributions, held)
        seen = ~np.isnan(held.observed)
        off = np.abs(held.observed * root - truth(world, held))[seen]
        systematic = 3 * held.replay.epsilon * np.abs(truth(world, held))[seen]
        assert np.all(off <= 8 * (held.stderr * np.abs(root))[seen] + systematic + 1e-12)


def test_a_reduction_with_every_factor_set_multiplies_by_all_of_them() -> None:
    event = Reduce(seq=1, t_ns=0, step=0, impl="hsdp", op="avg", group=(0, 1), params=0, pre_divide=2.0,
                   post_divide=4.0, replicate_group=(0, 2, 4), replicate_op="avg")  # fmt: skip
    assert nominal_factor(event) == pytest.approx(1 / (2 * 4 * 2 * 3))
    assert np.isnan(nominal_factor(Reduce(seq=1, t_ns=0, step=0, impl="ddp", op="unknown", group=(0, 1), params=0)))


@pytest.mark.parametrize("kind", [Reduce, ScaleGrads, AmpUnscale, ZeroGrad])
def test_a_lost_event_leaves_the_observed_weights_right(kind: type) -> None:
    """The observed ledger rests on samples: documentation only helps it to name what happened."""
    trainer = replace(PLAIN, stages=2, microbatches=2, op="avg", sync="every", loss_scale=1024.0)
    world = World(trainer, seed=3)
    run = world.run()
    for trace in run.ranks.values():
        trace.events = [event for event in trace.events if not isinstance(event, kind)]
    data = step_data(run, 0)
    contributions = collect(data.events)
    for held in measure(data, contributions):
        assert held.observed is not None
        np.testing.assert_allclose(held.observed * roots(contributions, held), truth(world, held), rtol=1e-3)


def test_shards_with_few_elements_are_solved_with_their_own_replica_and_not_with_another() -> None:
    """HSDP whose replicas nothing joins: what one replica holds says nothing about the other."""
    trainer = replace(PLAIN, impl="hsdp", data_ranks=4, replicas=2, accumulation=1, params=(("embed.weight", 5),),
                      join_replicas=False)  # fmt: skip
    world, contributions, measured = ledgers(trainer)
    assert measured and all(held.observed is not None for held in measured)
    for held in measured:
        assert held.observed is not None
        root = roots(contributions, held)
        np.testing.assert_allclose(held.observed * root, truth(world, held), rtol=1e-3, atol=1e-6 * root.max())


@pytest.mark.parametrize("seed", [7, 31])
def test_errors_that_several_ranks_have_from_one_earlier_state_add_up(seed: int) -> None:
    """Averaged at every backward, the same early contributions come back from every rank, with the same error."""
    trainer = replace(PLAIN, op="avg", sync="every", data_ranks=4, accumulation=4, dtype="bfloat16",
                      params=(("layers.0.weight", 512),))  # fmt: skip
    world, contributions, measured = ledgers(trainer)
    for held in measured:
        assert held.observed is not None and held.stderr is not None
        root = roots(contributions, held)
        off = np.abs(held.observed * root - truth(world, held)) / (held.stderr * root)
        assert float(np.sqrt(np.mean(off**2))) < 2.5


def test_a_tolerance_knows_the_dtype_in_which_ranks_are_summed() -> None:
    fsdp = replace(PLAIN, impl="fsdp", accumulation=2)
    exact, coarse = (ledgers(one)[2][0].replay.epsilon for one in (fsdp, replace(fsdp, reduce_dtype="bfloat16")))
    assert (exact, coarse) == (2.0**-23, 2.0**-7)


@pytest.mark.parametrize("foreign", [0.0, 0.3])
def test_contributions_that_are_added_up_in_their_own_type_fill_a_finer_buffer(foreign: float) -> None:
    """Microbatches of a split backward below FSDP are added up in bfloat16, and reduced in float32."""
    run = World(replace(PLAIN, impl="fsdp", dtype="bfloat16"), seed=1).run()
    for trace in run.ranks.values():
        (samples,) = trace.samples
        rows, bits = np.frombuffer(samples.rows, "<i4").reshape(-1, 4), np.frombuffer(samples.values, "<u2")
        ends = np.cumsum([trace.plans[plan].num_values for *_, plan in rows.tolist()])
        trace.samples.clear()
        for row, part in zip(rows, np.split(bits, ends[:-1]), strict=True):
            values = (part.astype("<u4") << 16).view("<f4") * np.float32(1 + foreign * (np.arange(len(part)) % 2))
            finer = {"dtype": "float32", "values": values.tobytes()} if row[1] != LEAF else {"values": part.tobytes()}
            trace.samples.append(msgspec.structs.replace(samples, rows=row.tobytes(), **finer))
    data = step_data(run, 0)
    for held in measure(data, collect(data.events)):
        assert (held.observed is None) is bool(foreign)


def test_a_reduction_in_bfloat16_of_other_parameters_widens_nothing() -> None:
    trainer = replace(PLAIN, impl="fsdp", accumulation=2)
    world = World(trainer, seed=1)
    run = world.run()
    for trace in run.ranks.values():
        one = ParamSet(id=99, params=(0,))
        trace.add([one])
        trace.events = [
            msgspec.structs.replace(event, dtype="bfloat16", params=99) if isinstance(event, Reduce) else event
            for event in trace.events
        ]
    data = step_data(run, 0)
    epsilon = {held.param[1]: held.replay.epsilon for held in measure(data, collect(data.events))}
    assert epsilon == {"embed.weight": 2.0**-7, "layers.0.weight": 2.0**-23, "norm.weight": 2.0**-23}


def test_a_reduction_that_broke_off_leaves_no_gradient_of_an_earlier_step() -> None:
    """A rank that died in a collective has sampled what it brought, and no event says of what."""
    data = step_data(World(PLAIN, seed=1).run(), 0)
    contributions = collect(data.events)
    for tracks in data.tracks.values():
        for track in tracks.values():
            last = max(point.seq for point in track.points)
            broken = max(event.seq for event in data.events[track.rank]) + 1
            track.points = [*(point for point in track.points if point.seq < last),
                            replace(track.points[-1], seq=broken, role=BEFORE)]  # fmt: skip
    for held in measure(data, contributions):
        assert not any(entry.leftover for entry in held.replay.entries[held.rank])


def test_what_was_no_combination_is_not_taken_for_one_again_by_chance() -> None:
    """FSDP's small shards in bfloat16: of 8 elements, 6 contributions make up something foreign now and then."""
    trainer = replace(PLAIN, impl="fsdp", sync="every", reduce_dtype="bfloat16", params=(("norm.weight", 16),))
    for seed in range(40):
        data = step_data(World(trainer, seed=seed).run(), 0)
        foreign = 0.3 * np.random.default_rng(seed).normal(size=16)
        for tracks in data.tracks.values():
            for track in tracks.values():
                first = min(point.seq for point in track.points)
                for point in track.points:
                    there = np.isfinite(point.values.data)
                    if point.seq == first or there.sum() < 16:  # before the first reduction, and what it went into
                        point.values.data[there] += foreign[there]
        for held in measure(data, collect(data.events)):
            assert held.observed is None and "no combination" in held.reason


def test_what_ranks_cancel_is_not_foreign() -> None:
    """The bias of context-parallel keys: each rank's share is the opposite of another's; few elements check it."""
    data = step_data(World(replace(PLAIN, params=(("k.bias", 4),)), seed=1).run(), 0)
    (tracks,) = data.tracks.values()
    slots, random = list(tracks[0].leaves), np.random.default_rng(0)
    shares = random.normal(size=(len(slots), 4)).astype(np.float32)
    leaves = {0: shares, 1: -(shares + 4e-7 * random.normal(size=shares.shape)).astype(np.float32)}
    sums = {rank: np.cumsum(of_rank, 0) for rank, of_rank in leaves.items()}
    for rank, track in tracks.items():
        for slot, values in zip(slots, leaves[rank], strict=True):
            track.leaves[slot][1].data[:] = values
        for index, point in enumerate(track.points):
            point.values.data[:] = sums[rank][index] if index < len(slots) else sums[0][-1] + sums[1][-1]
    for held in measure(data, collect(data.events)):
        assert "no combination" not in held.reason
