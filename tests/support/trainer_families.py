"""Families of random trainers with faults that no rule knows by name, and with two faults at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import compound_families  # noqa: F401 (registers its families)
import strange_families  # noqa: F401 (registers its families)
from known_families import FAMILIES, UNKNOWN, family, make_case, reduce_kind
from random_trainers import Case, Culprit, Random, degree, downstream, global_mean, healthy, microbatch_mean, one
from simulator import Hand, Key, Trainer

__all__ = ["FAMILIES", "make_case"]

Root = Callable[[Key, dict[Key, int]], float]


def _bracket(trainer: Trainer, place: str) -> set[Culprit]:
    """Between which recorded events a place lies. Both may be seen: the last before and the first after it."""
    first = "reduce" if trainer.impl != "none" else "backward"
    if trainer.stages > 1:
        first = "pipeline_step"
    last = "optimizer_step"
    if place in ("before_step", "before_clip") and trainer.clip is not None:
        last = "clip"
    if trainer.loss_scale != 1 and place == "before_step":
        # Unscaling is not sampled: the change lies somewhere from the last sample before it to the next one.
        return {Culprit(first, True, last), Culprit(first, True, "amp_unscale")}
    if trainer.loss_scale != 1 and place == "before_clip":
        return {Culprit("amp_unscale", True, last), Culprit(first, True, last)}
    if place == "before_optimizer" and trainer.clip is not None:
        first = "clip"
    elif place == "before_optimizer" and trainer.loss_scale != 1:
        return {Culprit("amp_unscale", True, last), Culprit(first, True, last)}
    return {Culprit(first, True, last)}


@family
def hand_behind_backward(random: Random) -> Case:
    """A factor on all gradients, by the user's own line between the last backward and the optimizer."""
    trainer = healthy(random)
    place = str(random.choice(["before_step", "before_clip", "before_optimizer"]))
    factor = float(random.choice([*UNKNOWN, 2.0, 3.0, float(trainer.data_ranks)]))
    if abs(factor - 1) < 1e-9 or factor < 1:
        factor = 2.6
    fault = one("GS000", _bracket(trainer, place), factor)
    return Case("", replace(trainer, hands=(Hand(place, factor),)), [fault])


@family
def clip_by_hand(random: Random) -> Case:
    """A factor below 1 on everything before the optimizer: a remark, never an error."""
    trainer = replace(healthy(random), clip=None)
    factor = float(random.choice([0.123, 0.0317, 0.83]))
    return Case("", replace(trainer, hands=(Hand("before_optimizer", factor),)))


@family
def hand_on_some_parameters(random: Random) -> Case:
    trainer = healthy(random)
    names = frozenset({trainer.params[0][0]})
    place = str(random.choice(["before_step", "before_optimizer"]))
    factor = float(random.choice(UNKNOWN))
    fault = one("GS000", _bracket(trainer, place), factor)
    return Case("", replace(trainer, hands=(Hand(place, factor, params=names),)), [fault])


@family
def hand_between_backwards(random: Random) -> Case:
    """.grad *= f between two accumulation steps: what was accumulated before weighs f."""
    trainer = healthy(random, impl="none", stages=1)
    accumulation = max(2, trainer.accumulation)
    factor = float(random.choice(UNKNOWN))
    step = int(random.integers(accumulation - 1))
    hand = Hand("after_backward", factor, steps=frozenset({step}))
    fault = one("GS000", Culprit("backward", True, "backward"))
    return Case("", replace(trainer, accumulation=accumulation, hands=(hand,)), [fault])


@family
def scaled_leaf(random: Random) -> Case:
    """A hook on the parameter multiplies what arrives, behind the probe's, on every contribution."""
    trainer = healthy(random)
    factor = float(random.choice(UNKNOWN))
    culprits = {Culprit("backward"), Culprit("backward", True, "backward")}
    culprits |= {Culprit("backward", True, kind) for kind in ("reduce", "pipeline_step", "scale_grads")}
    fault = one("GS000", culprits, factor)
    return Case("", replace(trainer, hands=(Hand("leaf", factor),)), [fault])


@family
def one_rank_scaled(random: Random) -> Case:
    """One rank multiplies its own contributions before the reduction."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1)
    factor = float(random.choice(UNKNOWN))
    hand = Hand("leaf", factor, data_ranks=frozenset({int(random.integers(trainer.data_ranks))}))
    culprits = {Culprit("backward"), *(Culprit("backward", True, kind) for kind in ("reduce", "backward"))}
    return Case("", replace(trainer, hands=(hand,)), [one("GS000", culprits)])


@family
def last_microbatch_scaled(random: Random) -> Case:
    trainer = healthy(random)
    accumulation, m = trainer.accumulation, trainer.microbatches
    if len(trainer.keys) == trainer.data_ranks:
        accumulation = 3
    trainer = replace(trainer, accumulation=accumulation, scale_grads=False)
    trainer = replace(trainer, root=global_mean(1 / downstream(trainer)), op=trainer.op)
    factor = float(random.choice(UNKNOWN))
    hand = Hand("leaf", factor, steps=frozenset({accumulation - 1}), microbatches=frozenset({m - 1}))
    culprits = {Culprit("backward"), *(Culprit("backward", True, kind) for kind in ("reduce", "pipeline_step"))}
    return Case("", replace(trainer, hands=(hand,)), [one("GS000", culprits)])


@family
def reduction_with_another_factor(random: Random) -> Case:
    """A reduction that does something else than it is documented to do."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp", "hsdp"])), stages=1, sync="last")
    factor = float(random.choice(UNKNOWN))
    fault = one("GS000", reduce_kind(), factor)
    return Case("", replace(trainer, hands=(Hand("in_reduce", factor),)), [fault])


@family
def reduced_again_by_hand(random: Random) -> Case:
    """A hand-written sum over ranks behind DDP's own reduction."""
    trainer = healthy(random, impl="ddp", stages=1)
    hand = Hand("before_step", all_reduce=True)
    fault = one({"GS000", "GS102"}, _bracket(trainer, "before_step"), float(trainer.data_ranks), "dp_replicate")
    return Case("", replace(trainer, hands=(hand,)), [fault])


def _part_of_losses(random: Random, trainer: Trainer) -> set[Key]:
    """A proper part of the contributions: an accumulation step, a data rank, or a single loss."""
    step, rank = int(random.integers(trainer.accumulation)), int(random.integers(trainer.data_ranks))
    kind = str(random.choice(["step", "rank", "single"]))
    parts = {
        "step": {key for key in trainer.keys if key[1] == step},
        "rank": {key for key in trainer.keys if key[0] == rank},
        "single": {trainer.keys[int(random.integers(len(trainer.keys)))]},
    }
    part = parts[kind]
    return part if len(part) < len(trainer.keys) else {trainer.keys[-1]}


def _root_on(part: set[Key], factor: float, healthy_root: Root) -> Root:
    return lambda key, tokens: healthy_root(key, tokens) * (factor if key in part else 1.0)


@family
def some_losses_scaled(random: Random) -> Case:
    """Some losses are multiplied in the loop; the others, and all that follows, are right."""
    trainer = healthy(random, stages=1, sync="last")
    trainer = replace(trainer, accumulation=max(2, trainer.accumulation), scale_grads=False)
    trainer = replace(trainer, root=global_mean(1 / downstream(trainer)))
    factor = float(random.choice(UNKNOWN))
    root = _root_on(_part_of_losses(random, trainer), factor, trainer.root)
    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"), factor)])


@family
def some_losses_scaled_and_averaged(random: Random) -> Case:
    """The last of at least three accumulation steps is multiplied, and what was divided by all tokens is averaged."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1, sync="last")
    trainer = replace(trainer, accumulation=max(3, trainer.accumulation), op="avg", divide=None, scale_grads=False)
    factor = float(random.choice(UNKNOWN))
    part = {key for key in trainer.keys if key[1] == trainer.accumulation - 1}
    faults = [one("GS000", Culprit("loss"), factor), one("GS101", reduce_kind(), 1 / trainer.data_ranks)]
    return Case("", replace(trainer, root=_root_on(part, factor, global_mean())), faults)


@family
def loss_by_a_count(random: Random) -> Case:
    """A running mean: the loss of accumulation step k is divided by k+1, or multiplied by it."""
    trainer = healthy(random, stages=1, sync="last")
    trainer = replace(trainer, accumulation=max(3, trainer.accumulation), scale_grads=False)
    right = global_mean(1 / downstream(trainer))
    power = int(random.choice([-1, 1]))

    def root(key: Key, tokens: dict[Key, int]) -> float:
        return right(key, tokens) * (key[1] + 1.0) ** power

    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"))])


@family
def not_unscaled(random: Random) -> Case:
    trainer = replace(healthy(random), loss_scale=1024.0, unscale=False)
    return Case("", trainer, [one({"GS303", "GS304"}, Culprit("loss"), 1024.0)])


@family
def averaging_of_means(random: Random) -> Case:
    """Two faults: a mean of means, averaged once more by the reduction."""
    trainer = replace(healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1), op="avg", divide=None)
    faults = [
        one("GS301", Culprit("loss")),
        one("GS101", reduce_kind(), 1 / trainer.data_ranks, f"1/{degree(trainer)}"),
    ]
    return Case("", replace(trainer, root=microbatch_mean()), faults)


@family
def averaging_and_a_hand(random: Random) -> Case:
    """Two faults: double averaging, and a factor of the user's own before the optimizer."""
    trainer = replace(healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1), op="avg", divide=None)
    factor = 2.6
    faults = [
        one("GS101", reduce_kind(), 1 / trainer.data_ranks, f"1/{degree(trainer)}"),
        one("GS000", _bracket(trainer, "before_optimizer"), factor),
    ]
    return Case("", replace(trainer, root=global_mean(), hands=(Hand("before_optimizer", factor),)), faults)


@family
def rescaling_and_averaging(random: Random) -> Case:
    """Two faults: scale_grads under accumulation, and an average behind it."""
    trainer = replace(healthy(random, impl="fsdp", stages=2), op="avg", divide=None, scale_grads=True)
    # As many ranks as microbatches, or a power: one hand explains all by itself, and rightly so.
    ranks = next(size for size in (trainer.data_ranks, 5, 3) if size not in (trainer.microbatches, 4))
    trainer = replace(trainer, accumulation=max(2, trainer.accumulation), root=global_mean(trainer.microbatches))
    trainer = replace(trainer, data_ranks=ranks)
    faults = [
        one("GS101", reduce_kind(), 1 / trainer.data_ranks, "1/dp_shard"),
        one("GS201", Culprit("scale_grads"), 1 / trainer.microbatches, "microbatches^-(K-1-k)"),
    ]
    return Case("", trainer, faults)
