"""Two faults of one trainer are told apart: none hides the other, and none lends it a name."""

from __future__ import annotations

from math import sqrt

import pytest
from random_trainers import global_mean
from reduced_steps import all_reduce, ended
from simulated_step import _backward, _scale
from simulator import BEFORE, Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import GradientNorm, GradWrite

LINE = 20


def multiplied(world: World, factor: float, line: int, names: list[str] | None = None) -> None:
    """A line that multiplies gradients of all ranks by a number."""
    for rank in world.ranks:
        chosen = names or list(rank.ids)
        _scale(world, rank, factor, chosen)
        rank.emit(GradWrite, line=line, params=rank.param_set(chosen), factor=factor)


def clipped(world: World, max_norm: float, *, seen: bool = True) -> None:
    """Each rank clips by the norm of its own gradients, on lines of the trainer's. `seen`: that it is taken."""
    for rank in world.ranks:
        if seen:
            seq = rank.next_seq()
            rank.sample_grads(seq, BEFORE, list(rank.ids))
            rank.emit(GradientNorm, seq=seq, line=LINE + 8, params=rank.everything)
        factor = max_norm / sqrt(sum(float((held.values**2).sum()) for held in rank.grad.values()))
        _scale(world, rank, factor, list(rank.ids))
        rank.emit(GradWrite, line=LINE + 9, params=rank.everything, factor=factor)


def summed(factor: float, *, loud: float = 1.0, accumulation: int = 2, tokens: tuple[int, int] = (3, 40)) -> World:
    """Two ranks behind their backward passes. Losses are multiplied by a factor, those of rank 1 also by `loud`."""
    right = global_mean(factor)
    trainer = Trainer(
        root=lambda key, tokens: right(key, tokens) * (loud if key[0] == 1 else 1.0),
        impl="none",
        data_ranks=2,
        accumulation=accumulation,
        tokens=tokens,
    )
    world = World(trainer, 3)
    for k in range(accumulation):
        _backward(world, k, 0)
    return world


def divided_in_each_pass(passes: int, tokens: tuple[int, int]) -> Report:
    """Sums of token losses of which `.grad` is divided by all tokens behind each pass."""
    trainer = Trainer(root=lambda key, counts: 1.0, impl="none", data_ranks=1, accumulation=passes, tokens=tokens)
    world = World(trainer, 3)
    for k in range(passes):
        _backward(world, k, 0)
        multiplied(world, 1 / sum(world.num_tokens.values()), LINE)
    return ended(world)


@pytest.mark.parametrize(("passes", "tokens"), [(2, (3, 40)), (3, (3, 40)), (2, (2000, 9000))])
def test_what_a_line_divides_in_each_pass_is_a_power_and_nothing_that_was_emptied(
    passes: int, tokens: tuple[int, int]
) -> None:
    (finding,) = divided_in_each_pass(passes, tokens).findings
    assert (finding.code, finding.factor.expression) == ("GS000", "num_tokens^-(K-1-k)")
    assert finding.first_event is not None and finding.first_event.line == LINE
    assert finding.fix.startswith("Let it act once in a step, behind the last pass")


def test_a_clip_by_hand_hides_no_constant_where_one_gradient_is_averaged_again() -> None:
    world = summed(2 * 2 / 3)
    for names in (None, ["embed.weight"]):
        all_reduce(world, ((0, 1),), LINE, names=names)
        multiplied(world, 1 / 2, LINE + 1, names)
    clipped(world, 0.05, seen=False)
    report = ended(world, with_norms=True)
    (finding,) = report.findings
    assert finding.factor.observed == pytest.approx(2 / 3, rel=1e-4)
    assert any("clipped by hand to norm 0.05 " in note for note in report.coverage.notes)


def test_an_average_again_before_a_clip_by_hand_is_nobodys_fault() -> None:
    world = summed(2.0)
    for names in (None, ["embed.weight"]):
        all_reduce(world, ((0, 1),), LINE, names=names)
        multiplied(world, 1 / 2, LINE + 1, names)
    clipped(world, 0.05, seen=False)
    assert ended(world, with_norms=True).verdict == "clean"


@pytest.mark.parametrize("averaged", [False, True])
def test_clips_by_the_norms_of_copies_that_differ_lend_a_loud_rank_no_factor(averaged: bool) -> None:
    """`averaged`: lines divide sums by all tokens before the reduction, and by the ranks behind it."""
    reduced = ["layers.0.weight", "norm.weight"]
    world = summed(48.0 if averaged else 1.0, loud=3.0, tokens=(12, 12))
    if averaged:
        multiplied(world, 2 / 48, LINE)
    all_reduce(world, ((0, 1),), LINE + 1, names=reduced)
    if averaged:
        multiplied(world, 1 / 2, LINE + 2, reduced)
    clipped(world, 0.05)
    left_out, loud = sorted(ended(world, with_norms=True).findings, key=lambda finding: finding.code, reverse=True)
    assert (left_out.code, [*left_out.units]) == ("GS103", ["embed.weight"])
    assert (loud.code, loud.pattern) == ("GS000", "x 3 on data rank 1, the rest right")


def test_what_weights_were_off_by_before_lines_with_numbers_of_their_own_is_told() -> None:
    """By a number of passes, which the same lines may divide by."""
    world = summed(2.0)
    all_reduce(world, ((0, 1),), LINE)
    for rank in world.ranks:
        seq = rank.next_seq()
        rank.sample_grads(seq, BEFORE, list(rank.ids))
        rank.emit(GradientNorm, seq=seq, line=LINE + 8, params=rank.everything)
        for name, factor in zip(rank.ids, (0.731847, 0.0421873, 0.291734), strict=True):
            _scale(world, rank, factor, [name])
    report = ended(world)
    assert report.verdict == "undetermined"
    assert "Up to there all weights are x 2 = accumulation_steps: they are wrong by that unless" in report.reasons[0]


@pytest.mark.parametrize("passes", [2, 3])
def test_one_emptying_in_the_loop_is_told_once_where_a_line_behind_it_divides(passes: int) -> None:
    """Sums that DDP averages in every pass, and that are divided by all tokens behind the last."""
    trainer = Trainer(root=lambda key, counts: 1.0, data_ranks=2, sync="every", accumulation=passes)
    world = World(trainer, 3)
    for k in range(passes):
        for rank in world.ranks:
            rank.grad.clear()  # what nobody records
        _backward(world, k, 0)
    multiplied(world, 2 / sum(world.num_tokens.values()), LINE)
    (finding,) = ended(world).findings
    assert finding.code == "GS401"
    assert finding.first_event is not None and finding.first_event.line != LINE


def test_a_whole_number_before_one_pass_s_loss_is_no_count_of_some_ranks() -> None:
    """Four ranks with as many tokens each: a count of two of them would be twice too small, too."""
    right = global_mean(4.0)
    trainer = Trainer(
        root=lambda key, counts: right(key, counts) * (2 if key[1] == 2 else 1),
        data_ranks=4,
        accumulation=3,
        tokens=(12, 12),
    )
    (finding,) = diagnose(World(trainer, 3).run()).findings
    assert (finding.code, finding.pattern) == ("GS000", "x 2 on the last accumulation step (2), the rest right")


def test_a_shard_that_has_nothing_of_the_own_batch_tells_of_no_result_thrown_away() -> None:
    """Rows of an embedding that no token of the rank's asks for, below one emptying in the loop."""
    trainer = Trainer(root=global_mean(2), impl="fsdp", data_ranks=2, sync="every", accumulation=3, zero_between=True)
    world = World(trainer, 3)
    rows = world.ranks[1].held["embed.weight"]
    world.token_gradients[0, "embed.weight"][trainer.keys.index((1, 1, 0)), rows] = 0
    (finding,) = diagnose(world.run()).findings
    assert (finding.code, finding.first_event and finding.first_event.kind) == ("GS401", "zero_grad")


def test_a_line_on_one_gradient_beside_a_loud_rank_is_told_of_that_one() -> None:
    """Where no weight is right, most gradients tell what all losses weigh, here x 2 in the mean."""
    world = summed(1.0, loud=3.0, accumulation=1, tokens=(12, 12))
    all_reduce(world, ((0, 1),), LINE)
    multiplied(world, 1 / 2, LINE + 1, ["embed.weight"])
    told = {finding.pattern: finding.units for finding in ended(world).findings}
    assert told.pop("every contribution x 0.5") == ["embed.weight"]
    assert list(told) == ["x 3 on data rank 1, the rest right"]


def test_lines_on_one_gradient_each_are_told_apart_where_nothing_is_measured_between_them() -> None:
    world = summed(1.0, accumulation=1)
    all_reduce(world, ((0, 1),), LINE)
    multiplied(world, 2, LINE + 1, ["embed.weight"])
    multiplied(world, 2, LINE + 2, ["norm.weight"])
    told = {tuple(one.units): one.first_event and one.first_event.line for one in ended(world).findings}
    assert told == {("embed.weight",): LINE + 1, ("norm.weight",): LINE + 2}


def test_a_line_on_one_gradient_lends_nothing_to_what_all_are_off_by_there() -> None:
    world = summed(1.0, accumulation=1)
    all_reduce(world, ((0, 1),), LINE)
    multiplied(world, 1.3, LINE + 1)
    multiplied(world, 2, LINE + 2, ["embed.weight"])
    told = {one.num_parameters: one for one in ended(world).findings}
    assert sorted(told) == [1, 3]
    assert told[1].first_event is not None and told[1].first_event.line == LINE + 2
    assert (told[1].units, told[1].factor.observed) == (["embed.weight"], pytest.approx(2, rel=1e-4))
    assert told[3].factor.observed == pytest.approx(1.3, rel=1e-4)


def test_a_pass_that_a_wrapper_does_not_reduce_would_have_been_averaged_as_the_others_are() -> None:
    """Losses that are too small by the ranks make what was not averaged look right."""
    trainer = Trainer(root=global_mean(1.0), data_ranks=2, sync="inverted", accumulation=2)
    told = {finding.code: finding for finding in diagnose(World(trainer, 3).run()).findings}
    assert told["GS303"].factor.observed == pytest.approx(0.5, rel=1e-4)
    assert told["GS303"].num_parameters == 3
    assert set(told) == {"GS103", "GS303"}


def test_a_line_that_makes_one_stage_s_gradient_right_is_not_what_all_others_lack() -> None:
    doubled = Hand("before_optimizer", 2.0, params=frozenset({"norm.weight"}), stages=frozenset({1}))
    trainer = Trainer(root=global_mean(0.5), impl="none", data_ranks=1, stages=2, microbatches=2, hands=(doubled,))
    (finding,) = diagnose(World(trainer, 3).run()).findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(0.5, rel=1e-4))
    assert not any("norm.weight" in unit for unit in finding.units if unit.startswith("stage 1"))


def test_a_gradient_that_is_not_averaged_hides_nothing_of_a_loud_rank() -> None:
    """Most gradients tell which losses have the scale that was meant, where none comes out right in all of them."""
    world = summed(2.0, loud=3.0, accumulation=2)
    reduced = ["layers.0.weight", "norm.weight"]
    all_reduce(world, ((0, 1),), LINE, names=reduced)
    multiplied(world, 1 / 2, LINE + 1, reduced)
    told = {finding.code: finding for finding in ended(world).findings}
    assert (told["GS103"].units, told["GS103"].factor.observed) == (["embed.weight"], pytest.approx(2, rel=1e-4))
    assert told["GS000"].pattern == "x 3 on data rank 1, the rest right"
    assert len(told) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_line_on_one_gradient_leaves_a_buffer_that_passes_divide_its_law(ranks: int) -> None:
    """What the line doubles comes out right where the others are halved, and says nothing of what these lack."""
    trainer = Trainer(root=global_mean(1.0 * ranks), impl="none", data_ranks=ranks, accumulation=3)
    world = World(trainer, 3)
    for k in range(3):
        _backward(world, k, 0)
        if k < 2:
            multiplied(world, 1 / 2, LINE)
    if ranks > 1:
        all_reduce(world, ((0, 1),), LINE + 2)
        multiplied(world, 1 / 2, LINE + 3)
    multiplied(world, 2, LINE + 5, ["norm.weight"])
    halved, doubled = sorted(ended(world).findings, key=lambda finding: -finding.num_parameters)
    assert halved.pattern == "x 0.25 0.5 1 by accumulation step: 0.5^(K-1-k)"
    assert (halved.num_parameters, halved.first_event and halved.first_event.line) == (3, LINE)
    assert (doubled.units, doubled.factor.observed) == (["norm.weight"], pytest.approx(2, rel=1e-4))
    assert doubled.first_event is not None and doubled.first_event.line == LINE + 5


def test_a_line_that_unscales_a_few_gradients_is_what_the_others_lack() -> None:
    world = summed(1024 * 2.0, accumulation=1)
    all_reduce(world, ((0, 1),), LINE)
    multiplied(world, 1 / 2, LINE + 1)
    multiplied(world, 1 / 1024, LINE + 2, ["norm.weight"])
    (finding,) = ended(world).findings
    assert (finding.num_parameters, finding.factor.observed) == (2, pytest.approx(1024, rel=1e-4))
