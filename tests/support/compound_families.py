"""Families of random trainers whose fault depends on two things at once, or on what nobody counts."""

from __future__ import annotations

from dataclasses import replace

from known_families import UNKNOWN, family
from random_trainers import Case, Culprit, Random, downstream, global_mean, healthy, one
from simulator import Hand, Key
from strange_families import BEHIND_LEAF


@family
def one_stage_in_one_accumulation_step(random: Random) -> Case:
    """A hook of one pipeline stage multiplies what arrives in one accumulation step only."""
    trainer = replace(healthy(random, stages=2), scale_grads=False, op="avg")
    trainer = replace(trainer, accumulation=max(2, trainer.accumulation))
    trainer = replace(trainer, root=global_mean(1 / downstream(trainer)))
    stage, step = int(random.integers(2)), int(random.integers(trainer.accumulation))
    factor = float(random.choice(UNKNOWN))
    hand = Hand("leaf", factor, stages=frozenset({stage}), steps=frozenset({step}))
    return Case("", replace(trainer, hands=(hand,)), [one("GS000", BEHIND_LEAF)])


@family
def one_rank_in_one_accumulation_step(random: Random) -> Case:
    """The losses of one data rank in one accumulation step are multiplied."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1, sync="last")
    trainer = replace(trainer, accumulation=max(2, trainer.accumulation))
    right, rank, step = (
        trainer.root,
        int(random.integers(trainer.data_ranks)),
        int(random.integers(trainer.accumulation)),
    )
    factor = float(random.choice(UNKNOWN))

    def root(key: Key, tokens: dict[Key, int]) -> float:
        return right(key, tokens) * (factor if key[:2] == (rank, step) else 1.0)

    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"), factor)])


@family
def by_the_size_of_a_parameter(random: Random) -> Case:
    """A line before the optimizer scales gradients by their sizes: one factor for the small, others for the large."""
    trainer = healthy(random)
    params = (("layers.0.weight", 96), ("layers.1.weight", 192), ("norm.weight", 64))
    factors = (0.75, 1.5, 0.5)
    hands = tuple(
        Hand("before_optimizer", factor, params=frozenset({name}))
        for (name, _), factor in zip(params, factors, strict=True)
    )
    culprits = {
        Culprit(kind, True, "optimizer_step") for kind in ("clip", "reduce", "backward", "pipeline_step", "amp_unscale")
    }
    trainer = replace(trainer, params=params, key_bias=False, dtype="float32", loss_dtype="float32", hands=hands)
    return Case("", trainer, [one("GS000", culprits)])


@family
def ranks_of_another_run(random: Random) -> Case:
    """The loss makes up for an average over the ranks that the run had before it was restarted with fewer: a number
    that nothing in this run has, nor any product of what it has."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1, sync="last")
    trainer = replace(trainer, op="avg", divide=None)
    before = int(random.choice([7, 11]))
    factor = before / trainer.data_ranks
    return Case("", replace(trainer, root=global_mean(float(before))), [one("GS303", Culprit("loss"), factor)])


@family
def one_accumulation_step_counted_by_microbatches(random: Random) -> Case:
    """The first accumulation step is a mean of means, the others divide by all tokens: a count in one branch only."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1, sync="last")
    trainer = replace(trainer, accumulation=max(3, trainer.accumulation), dtype="float32", loss_dtype="float32")
    trainer = replace(trainer, tokens=(3, 400))  # with equal counts it is a count of the accumulation step as well
    right = trainer.root

    def root(key: Key, tokens: dict[Key, int]) -> float:
        mean = sum(tokens.values()) / (len(tokens) * tokens[key])
        return right(key, tokens) * (mean if key[1] == 0 else 1.0)

    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"))])
