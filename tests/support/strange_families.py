"""Families of random trainers that resemble nothing on any list: what the engine must judge without a rule for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from known_families import UNKNOWN, family
from random_trainers import Case, Culprit, Random, downstream, global_mean, group_mean, healthy, one
from simulator import Hand, Key, Trainer

BEHIND_LEAF = {
    Culprit("backward"),
    *(Culprit("backward", True, kind) for kind in ("backward", "reduce", "pipeline_step", "scale_grads")),
}
"""Between a leaf and the first sample behind it."""


def _accumulating(random: Random, least: int, *, impl: str | None = None) -> Trainer:
    """A right trainer of one stage with several accumulation steps."""
    trainer = healthy(random, impl=impl, stages=1, sync="last")
    trainer = replace(trainer, accumulation=max(least, trainer.accumulation), scale_grads=False)
    return replace(trainer, root=global_mean(1 / downstream(trainer)))


@family
def loss_by_tokens_squared(random: Random) -> Case:
    """Each loss is multiplied by the square of its tokens, and the total is normalised again."""
    trainer = _accumulating(random, 3)
    right = trainer.root

    def root(key: Key, tokens: dict[Key, int]) -> float:
        total = sum(count**3 for count in tokens.values())
        return right(key, tokens) * tokens[key] ** 2 * sum(tokens.values()) / total

    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"))])


@family
def every_second_pass_scaled(random: Random) -> Case:
    """A hook that counts its calls multiplies every second gradient."""
    trainer = _accumulating(random, 3)
    steps = frozenset(range(1, trainer.accumulation, 2))
    hand = Hand("leaf", float(random.choice(UNKNOWN)), steps=steps)
    return Case("", replace(trainer, hands=(hand,)), [one("GS000", BEHIND_LEAF)])


@family
def tokens_of_the_next_rank(random: Random) -> Case:
    """Each rank divides by the tokens of the next one."""
    trainer = healthy(random, impl=str(random.choice(["ddp", "fsdp"])), stages=1, sync="last")
    trainer = replace(trainer, accumulation=max(2, trainer.accumulation), scale_grads=False)
    share = 1 / (downstream(trainer) * trainer.data_ranks)

    def root(key: Key, tokens: dict[Key, int]) -> float:
        other = (key[0] + 1) % trainer.data_ranks
        return share / sum(count for (rank, _, _), count in tokens.items() if rank == other)

    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"))])


@family
def tokens_of_a_group(random: Random) -> Case:
    """The token count was all-reduced over half of the data ranks, on all of them or on one group only."""
    trainer = _of_four(random)
    size, strided = 2, bool(random.random() < 0.5)
    num_groups = trainer.data_ranks // size
    only = frozenset(range(size)) if random.random() < 0.4 and not strided else None
    factor = float(random.choice([1.0, 1 / num_groups])) if only is None else 1.0
    root = group_mean(size, factor / downstream(trainer), strided=strided, only=only)
    # One number, known to some per cent, may be any other one.
    vague = only is not None and "bfloat16" in (trainer.dtype, trainer.loss_dtype)
    return Case("", replace(trainer, root=root), [one({"GS305", "GS000"} if vague else "GS305", Culprit("loss"))])


@family
def tokens_of_an_accumulation_step(random: Random) -> Case:
    """Each accumulation step divides by its own tokens over all ranks, and by the number of steps."""
    trainer = replace(_of_four(random), accumulation=4)

    def root(key: Key, tokens: dict[Key, int]) -> float:
        own = sum(count for other, count in tokens.items() if other[1] == key[1])
        return 1 / (downstream(trainer) * trainer.accumulation * own)

    return Case("", replace(trainer, root=root), [one("GS305", Culprit("loss"))])


def _of_four(random: Random) -> Trainer:
    trainer = _accumulating(random, 1, impl=str(random.choice(["ddp", "fsdp"])))
    trainer = replace(trainer, data_ranks=int(random.choice([4, 6])), divide=None)
    return replace(trainer, root=global_mean(1 / downstream(trainer)))


@family
def normalised_by_hand(random: Random) -> Case:
    """Right: the loss is a sum, and a line before the optimizer divides by all tokens and what the average left out."""
    trainer = replace(healthy(random, stages=1, sync="last"), loss_scale=1.0)
    num_tokens = float(7 * len(trainer.keys))
    trainer = replace(trainer, tokens=(7, 7), root=lambda key, tokens: 1.0)
    return Case("", replace(trainer, hands=(Hand("before_step", 1 / (num_tokens * downstream(trainer))),)))


@family
def normalised_by_a_wrong_number(random: Random) -> Case:
    """The loss is a sum, and a line before the optimizer divides by another number than all tokens."""
    case = normalised_by_hand(random)
    hand = case.trainer.hands[0]
    factor = float(random.choice([1.25, 2.6, 1.37]))
    # What the line should have divided by and the loss may be told together.
    culprits = {
        Culprit(kind, True, last) for kind in ("loss", "backward", "reduce") for last in ("clip", "optimizer_step")
    }
    trainer = replace(case.trainer, hands=(replace(hand, factor=hand.factor * factor),))
    return Case("", trainer, [one("GS000", culprits, factor)])


@family
def longest_left_out(random: Random) -> Case:
    """The contribution with most tokens does not arrive: a hook drops it as an outlier."""
    trainer = _accumulating(random, 3)

    def drop(key: Key, tokens: dict[Key, int]) -> float:
        return float(key != max(tokens, key=lambda other: (tokens[other], other)))

    hand = Hand("leaf", of_key=drop)
    return Case("", replace(trainer, hands=(hand,)), [one("GS000", BEHIND_LEAF)])


@family
def only_the_last_two_losses(random: Random) -> Case:
    """All losses but those of the last two accumulation steps are multiplied by zero."""
    trainer = _accumulating(random, 3)
    right, first = trainer.root, trainer.accumulation - 2

    def root(key: Key, tokens: dict[Key, int]) -> float:
        return right(key, tokens) if key[1] >= first else 0.0

    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"))])


@family
def every_loss_by_a_number_of_its_own(random: Random) -> Case:
    trainer = _accumulating(random, 3)
    factors = {
        key: float(value) for key, value in zip(trainer.keys, random.uniform(0.3, 3, len(trainer.keys)), strict=True)
    }
    right = trainer.root

    def root(key: Key, tokens: dict[Key, int]) -> float:
        return right(key, tokens) * factors[key]

    return Case("", replace(trainer, root=root), [one("GS000", Culprit("loss"))])


@family
def forgetting_accumulation(random: Random) -> Case:
    """.grad is halved before each further pass, as a moving average would."""
    trainer = _accumulating(random, 3, impl="none")
    steps = frozenset(range(trainer.accumulation - 1))
    hand = Hand("after_backward", 0.5, steps=steps)
    return Case("", replace(trainer, hands=(hand,)), [one("GS000", Culprit("backward", True, "backward"))])


@family
def stages_with_faults_of_their_own(random: Random) -> Case:
    """One stage multiplies what arrives, the other what it has accumulated."""
    trainer = replace(healthy(random, impl="none", stages=2), clip=None, loss_scale=1.0)
    hands = (Hand("leaf", 0.7, stages=frozenset({0})), Hand("before_optimizer", 2.6, stages=frozenset({1})))
    faults = [one("GS000", BEHIND_LEAF, 0.7), one("GS000", Culprit("pipeline_step", True, "optimizer_step"), 2.6)]
    return Case("", replace(trainer, hands=hands), faults)


@family
def undone_again(random: Random) -> Case:
    """Right all the same: a hook multiplies what arrives, and a line before the optimizer divides by the same."""
    trainer = healthy(random)
    factor = float(random.choice([2.0, 8.0, 3.7]))
    return Case("", replace(trainer, hands=(Hand("leaf", factor), Hand("before_optimizer", 1 / factor))))


@family
def gradient_of_the_step_before(random: Random) -> Case:
    """Nine tenths of an earlier gradient are added before the optimizer: nothing of this step."""
    trainer = healthy(random)
    noise = np.random.default_rng(int(random.integers(2**31)))

    def add(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        sizes = {name: float(np.abs(values).mean()) for name, values in grads.items()}
        return {name: values + 0.9 * sizes[name] * noise.normal(size=len(values)) for name, values in grads.items()}

    return Case("", replace(trainer, hands=(Hand("before_optimizer", strange=add),)), unknowable=True)


@family
def two_units_exchanged(random: Random) -> Case:
    """The optimizer reads one parameter's gradient for another's."""
    trainer = healthy(random)
    first, second = (name for name, _ in trainer.params[:2])
    params = ((first, 128), (second, 128), *trainer.params[2:])

    def exchange(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**grads, first: grads[second], second: grads[first]}

    trainer = replace(trainer, params=params, hands=(Hand("before_optimizer", strange=exchange),))
    return Case("", trainer, [one("GS404", Culprit("optimizer_step"))])


@family
def only_signs(random: Random) -> Case:
    """Compressed to signs before the optimizer."""
    trainer = healthy(random)

    def signs(grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: np.sign(values) * np.abs(values).mean() for name, values in grads.items()}

    return Case("", replace(trainer, hands=(Hand("before_optimizer", strange=signs),)), unknowable=True)
