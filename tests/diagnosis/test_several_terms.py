"""Losses that each pass adds up are told as terms with coefficients, and none of them is accused or called right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from random_trainers import global_mean
from simulator import Hand, Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss, LossGradient, Site
from gradcheck_dist.trace.run import Run

Root = Callable[[Key, dict[Key, int]], float]
SHARE = 0.3
TRAINER = Trainer(root=global_mean(), op="sum", accumulation=3, auxiliary=global_mean(SHARE))


def recorded(trainer: Trainer, lines: tuple[int, int] = (20, 20)) -> Run:
    """A run whose second loss was declared by nobody; both were computed on these lines."""
    run = World(trainer, 5).run()
    for trace in run.ranks.values():
        for index, event in enumerate(trace.events):
            if isinstance(event, Loss):
                line = lines[event.term != "main"]
                site = Site("train.py", line, "main")
                trace.events[index] = msgspec.structs.replace(event, term="main", coefficient=None, site=site)
    return run


def judged(trainer: Trainer, lines: tuple[int, int] = (20, 20)) -> Report:
    return diagnose(recorded(trainer, lines))


@pytest.mark.parametrize("share", [0.3, 0.045])
def test_what_a_second_loss_weighs_beside_the_main_one_is_told(share: float) -> None:
    report = judged(replace(TRAINER, auxiliary=global_mean(share)))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert f"loss 2 at train.py:20 weighs x {share:g}" in report.reasons[0]
    assert all(weight.ratio == pytest.approx(1.0, rel=1e-5) for weight in report.weights)


def test_the_larger_one_is_the_main_loss_wherever_it_stands() -> None:
    report = judged(replace(TRAINER, root=global_mean(SHARE), auxiliary=global_mean()))
    assert report.verdict == "undetermined"
    assert f"loss 1 at train.py:20 weighs x {SHARE:g}" in report.reasons[0]


def two_means(lines: tuple[int, int]) -> Report:
    """Two means of one weight, of which the second goes over twice as many tokens."""
    run = recorded(replace(TRAINER, auxiliary=global_mean(1 / 2)), lines)
    for trace in run.ranks.values():
        losses = [event.loss_id for event in trace.events if isinstance(event, Loss)]
        for index, event in enumerate(trace.events):
            if isinstance(event, Loss | LossGradient) and event.loss_id in losses[1::2]:
                trace.events[index] = msgspec.structs.replace(event, num_tokens=2 * (event.num_tokens or 0))
    return diagnose(run)


def two_sums(divisor: float) -> Report:
    """Two losses of one weight, of which the second goes over half the tokens, and a line that divides both by those of
    the first times a number."""
    total = sum(World(TRAINER, 5).num_tokens.values())
    hand = Hand("before_step", 1 / (divisor * total))
    return half_counted(replace(TRAINER, root=lambda *_: 1.0, auxiliary=lambda *_: 1.0, hands=(hand,)))


def half_counted(trainer: Trainer) -> Report:
    """Of two losses the second goes over half the tokens of the first."""
    run = recorded(trainer)
    for trace in run.ranks.values():
        losses = [event.loss_id for event in trace.events if isinstance(event, Loss)]
        for index, event in enumerate(trace.events):
            if isinstance(event, Loss | LossGradient) and event.loss_id in losses[1::2]:
                trace.events[index] = msgspec.structs.replace(event, num_tokens=((event.num_tokens or 0) + 1) // 2)
    return diagnose(run)


def test_a_mean_over_rows_that_a_threshold_leaves_out_beside_another_may_be_meant_so() -> None:
    """Pseudo-labels that count where the model is sure of them, divided by the rows of the batch (FixMatch)."""
    report = half_counted(replace(TRAINER, auxiliary=global_mean()))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "as many tokens as the largest of them, by whose tokens all are divided" in report.reasons[0]
    assert half_counted(replace(TRAINER, root=global_mean(3), auxiliary=global_mean(3))).verdict == "findings"


def test_heads_whose_sums_are_divided_by_the_tokens_of_the_first_may_be_meant_so() -> None:
    report = two_sums(1)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "as many tokens as the largest of them, by whose tokens all are divided" in report.reasons[0]
    assert two_sums(3).verdict == "findings"


def test_losses_of_other_lines_that_weigh_alike_are_means_of_their_own() -> None:
    report = two_means((20, 21))
    assert (report.verdict, report.findings) == ("clean", [])
    assert any("loss 2 at train.py:21 weighs x 1:" in note for note in report.coverage.notes)


def test_losses_of_one_line_that_weigh_alike_may_be_summands_of_one_loss() -> None:
    """A mean for each sample, added up, weighs as many times too much as there are samples."""
    report = two_means((20, 20))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert not any("what the objective asks for" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    "trainer",
    [
        replace(TRAINER, root=global_mean(3), auxiliary=global_mean(3 * SHARE)),
        replace(TRAINER, root=global_mean(1 / 3), auxiliary=global_mean(SHARE / 3)),
        replace(TRAINER, op="avg"),
        replace(TRAINER, auxiliary=lambda key, tokens: SHARE * (1 + key[1]) / sum(tokens.values())),
    ],
)
def test_where_no_loss_weighs_what_is_asked_none_is_called_right(trainer: Trainer) -> None:
    report = judged(trainer)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert not any("what the objective asks for" in reason for reason in report.reasons)


def test_a_line_that_scales_gradients_is_found_beside_such_losses() -> None:
    report = judged(replace(TRAINER, hands=(Hand("before_step", 0.5, params=("norm.weight",)),)))
    assert report.verdict == "findings"
    assert report.findings[0].factor.observed == pytest.approx(0.5)
