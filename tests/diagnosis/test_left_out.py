"""Contributions that weigh nothing: left out on purpose, or lost; and what several losses share is one finding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from held_back import hold_back
from random_trainers import global_mean, microbatch_mean
from simulator import Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import Loss

Root = Callable[[Key, dict[Key, int]], float]
DUMMY = (1, 1, 0)


def trainer(root: Root, *, zero_between: bool = False) -> Trainer:
    return Trainer(root, accumulation=2, op="sum", zero_between=zero_between)


def without_dummy(key: Key, tokens: dict[Key, int]) -> float:
    return 0.0 if key == DUMMY else 1 / sum(count for other, count in tokens.items() if other != DUMMY)


def dummy_lost(key: Key, tokens: dict[Key, int]) -> float:
    return 0.0 if key == DUMMY else 1 / sum(tokens.values())


def dummy_and_a_constant(key: Key, tokens: dict[Key, int]) -> float:
    return 2.6 * dummy_lost(key, tokens)


def test_a_loss_times_zero_that_no_other_counts_is_left_out_on_purpose() -> None:
    report = diagnose(World(trainer(without_dummy), 1).run())
    assert (report.verdict, report.findings) == ("clean", [])


def test_a_loss_times_zero_that_the_others_count_is_lost() -> None:
    (finding,) = diagnose(World(trainer(dummy_lost), 1).run()).findings
    assert (finding.code, finding.first_event.kind) == ("GS000", "loss")  # type: ignore[union-attr]
    assert "x 0, the rest x 1" in finding.pattern


def test_where_neither_fits_it_is_said() -> None:
    report = diagnose(World(trainer(dummy_and_a_constant), 1).run())
    assert any("multiplied by zero" in reason for reason in report.reasons)


def test_a_pass_that_counts_no_tokens_leaves_none_out() -> None:
    """Elementwise losses of which all are ignored weigh nothing, whatever else is off (a clip by hand)."""
    world = World(trainer(dummy_and_a_constant), 1)
    world.num_tokens[DUMMY] = 0
    report = diagnose(world.run())
    assert not any("without weight" in reason for reason in report.reasons)
    (finding,) = report.findings
    assert finding.factor.observed == pytest.approx(2.6)


@pytest.mark.parametrize(("only_last", "codes"), [(True, []), (False, ["GS401"])])
def test_passes_with_unseen_labels_that_were_emptied(only_last: bool, codes: list[str]) -> None:
    def last_only(key: Key, tokens: dict[Key, int]) -> float:
        return 1 / sum(count for other, count in tokens.items() if other[1] == 1)

    world = World(trainer(last_only if only_last else global_mean(), zero_between=True), 1)
    assert [finding.code for finding in diagnose(hold_back(world.run(), Loss)).findings] == codes


def test_a_mean_of_means_that_nobody_divides_is_one_finding() -> None:
    (finding,) = diagnose(World(Trainer(microbatch_mean(3.0), accumulation=3, op="sum"), 1).run()).findings
    assert finding.code == "GS301"
    assert finding.factor.expression == "accumulation_steps * num_tokens/(contributions * n_c)"
    assert "times accumulation_steps" in finding.explanation


def test_a_pass_in_which_the_holder_alone_has_tokens_is_not_reduced_like_the_others() -> None:
    """Losses ask for an average over two ranks, of which one has no tokens in the last pass."""

    world = World(Trainer(global_mean(2), accumulation=2, sync="never"), 1)
    world.num_tokens[0, 1, 0] = 0
    (finding,) = diagnose(world.run()).findings
    assert (finding.code, finding.pattern) == ("GS103", "other ranks' contributions x 0, own rank's x 2")
