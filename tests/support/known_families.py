"""Families of random trainers: the healthy ones and every fault that a rule knows by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from random_trainers import (
    Case,
    Culprit,
    Random,
    degree,
    downstream,
    global_mean,
    healthy,
    microbatch_mean,
    one,
    rank_mean,
)
from simulator import Hand

Family = Callable[[Random], Case]
FAMILIES: dict[str, Family] = {}
UNKNOWN = (0.7, 1.37, 0.123, 2.6, 11.3, 0.031)
"""Factors that no product of degrees equals."""


def family(make: Family) -> Family:
    FAMILIES[make.__name__.replace("_", "-")] = make
    return make


def make_case(name: str, seed: int) -> Case:
    """The family's trainer number `seed`."""
    case = FAMILIES[name](np.random.default_rng([seed, sum(name.encode())]))
    case.family, case.seed = name, seed
    return case


def reduce_kind() -> Culprit:
    return Culprit("reduce")


@family
def healthy_trainers(random: Random) -> Case:
    return Case("", healthy(random))


@family
def reduced_by_hand(random: Random) -> Case:
    """Data parallelism written by hand, over flattened buffers that no probe follows: right all the same."""
    trainer = replace(healthy(random, impl="none", stages=1), data_ranks=int(random.choice([2, 3])))
    average = bool(random.random() < 0.5)
    size = trainer.data_ranks
    hand = Hand("before_step", 1 / size if average else 1.0, all_reduce=True)
    root = global_mean(size if average else 1.0)
    return Case("", replace(trainer, impl="none", hands=(hand,), root=root))


@family
def reduced_in_bfloat16(random: Random) -> Case:
    """Right: float32 gradients that FSDP sums in bfloat16."""
    trainer = healthy(random, impl=str(random.choice(["fsdp", "hsdp"])))
    sizes = tuple((name, 512) for name, _ in trainer.params)
    trainer = replace(trainer, dtype="float32", loss_dtype="float32", reduce_dtype="bfloat16", params=sizes)
    return Case("", trainer)


@family
def double_averaging(random: Random) -> Case:
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp", "hsdp"])))
    trainer = replace(trainer, op="avg", divide=None)
    scale = 1 / trainer.microbatches if trainer.scale_grads else 1.0
    fault = one("GS101", reduce_kind(), 1 / trainer.data_ranks, f"1/{degree(trainer)}")
    return Case("", replace(trainer, root=global_mean(1 / scale)), [fault])


@family
def repeated_reduction(random: Random) -> Case:
    trainer = healthy(random, impl="ddp", stages=1)
    trainer = replace(trainer, op="sum", sync="every", accumulation=max(2, trainer.accumulation), root=global_mean())
    fault = one("GS102", reduce_kind(), float(trainer.data_ranks), "dp_replicate^(K-1-k)")
    return Case("", trainer, [fault])


@family
def never_reduced(random: Random) -> Case:
    trainer = replace(healthy(random, impl="ddp", stages=1), sync="never", op="sum", root=global_mean())
    return Case("", trainer, [one("GS103", Culprit("backward"))])


@family
def inverted_no_sync(random: Random) -> Case:
    """All but the last backward reduce, by an average: the last step's gradients stay on their own rank."""
    trainer = healthy(random, impl="ddp", stages=1)
    trainer = replace(trainer, op="avg", sync="inverted", accumulation=max(2, trainer.accumulation),
                      root=global_mean(trainer.data_ranks))  # fmt: skip
    return Case("", trainer, [one("GS103", Culprit("backward"))])


@family
def ignored_parameter(random: Random) -> Case:
    trainer = healthy(random, impl="ddp", stages=1)
    name = trainer.params[int(random.integers(len(trainer.params)))][0]
    return Case("", replace(trainer, not_reduced=frozenset({name})), [one("GS103", Culprit("backward"))])


@family
def rescaled_accumulation(random: Random) -> Case:
    impl = str(random.choice(["none", "fsdp"]))
    trainer = healthy(random, impl=impl, stages=2)
    trainer = replace(trainer, scale_grads=True, accumulation=max(2, trainer.accumulation))
    trainer = replace(trainer, root=global_mean(1 / downstream(trainer)))
    fault = one("GS201", Culprit("scale_grads"), 1 / trainer.microbatches, "microbatches^-(K-1-k)")
    return Case("", trainer, [fault])


@family
def mean_of_means(random: Random) -> Case:
    trainer = healthy(random)
    if len(trainer.keys) == 1:
        trainer = replace(trainer, accumulation=3, scale_grads=False)
    trainer = replace(trainer, root=microbatch_mean(1 / downstream(trainer)))
    return Case("", trainer, [one("GS301", Culprit("loss"))])


@family
def mean_of_rank_means(random: Random) -> Case:
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp", "hsdp"])))
    accumulation = trainer.accumulation if trainer.stages > 1 else max(2, trainer.accumulation)
    trainer = replace(trainer, accumulation=accumulation)
    return Case("", replace(trainer, root=rank_mean(1 / downstream(trainer))), [one("GS302", Culprit("loss"))])


@family
def wrong_normalizer(random: Random) -> Case:
    trainer = healthy(random)
    known = {"accumulation_steps": float(trainer.accumulation), "microbatches": float(trainer.microbatches)}
    if trainer.impl in ("ddp", "fsdp"):
        known[degree(trainer)] = float(trainer.data_ranks)
    known = {name: value for name, value in known.items() if value > 1}
    if not known:
        known = {"two": 2.0}
    name = str(random.choice(sorted(known)))
    over = bool(random.random() < 0.5)
    factor = known[name] if over else 1 / known[name]
    # A reduction that averages after a loss without its R is double averaging, and rightly named so.
    averages = not over and 1 / downstream(replace(trainer, scale_grads=False)) == known[name]
    undoes = trainer.scale_grads and not over and known[name] == trainer.microbatches
    root = global_mean(factor / downstream(trainer))
    codes, culprits = {"GS303"}, {Culprit("loss")}
    if averages and trainer.impl != "none":
        codes, culprits = codes | {"GS101"}, culprits | {reduce_kind()}
    if undoes:
        codes, culprits = codes | {"GS201"}, culprits | {Culprit("scale_grads")}
    expression = None if name == "two" else name if over else f"1/{name}"
    return Case("", replace(trainer, root=root), [one(codes, culprits, factor, expression)])


@family
def sum_of_means(random: Random) -> Case:
    """Losses that are means of each rank's own tokens, added up over ranks and not averaged."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp", "hsdp"])), stages=1, sync="last")
    count = int(random.integers(3, 40))
    root = rank_mean(trainer.data_ranks)
    trainer = replace(trainer, op="sum", divide=None, reduction="mean", tokens=(count, count), root=root)
    return Case("", trainer, [one("GS104", reduce_kind(), float(trainer.data_ranks), degree(trainer))])


@family
def wrong_constant(random: Random) -> Case:
    """A constant that is made of nothing known."""
    trainer = healthy(random)
    factor = float(random.choice(UNKNOWN))
    root = global_mean(factor / downstream(trainer))
    return Case("", replace(trainer, root=root), [one({"GS303"}, Culprit("loss"), factor)])


@family
def zeroed_accumulation(random: Random) -> Case:
    trainer = healthy(random, impl=str(random.choice(["none", "ddp"])), stages=1, sync="last")
    accumulation = max(2, trainer.accumulation)
    trainer = replace(trainer, zero_between=True, accumulation=accumulation)
    return Case("", trainer, [one("GS401", Culprit("zero_grad"))])
