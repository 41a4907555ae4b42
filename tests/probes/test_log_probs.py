"""Losses that are log-probabilities picked by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradcheck_dist
from gradcheck_dist.events import Event, Loss, LossGradient
from gradcheck_dist.probes.losses.log_probs import is_log_softmax
from gradcheck_dist.trace.run import read_run


def gradients(folder: Path, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[LossGradient]:
    """What was recorded of losses in one backward pass over logits of 6 tokens, the last two masked away."""
    model = nn.Linear(4, 5)
    with gradcheck_dist.attach(folder / "run"):
        loss_of(model(torch.randn(6, 4)), torch.randint(5, (6,))).backward()
    events: list[Event] = read_run(folder / "run").ranks[0].events
    return [event for event in events if isinstance(event, LossGradient)]


MASK = torch.tensor([1.0, 1, 1, 1, 0, 0])


def test_log_softmax_and_gather_is_a_loss_whose_masked_tokens_do_not_count(tmp_path: Path) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = torch.log_softmax(logits, -1).view(2, 3, 5)
        return -(torch.gather(log_probs, -1, labels.view(2, 3, 1)).flatten() * MASK).sum() / 8

    (found,) = gradients(tmp_path, loss)
    assert (found.num_tokens, found.weight) == (4, pytest.approx(1 / 8))
    assert found.weight_min == found.weight_max == pytest.approx(1 / 8)


@pytest.mark.parametrize("late", [False, True])
def test_rows_that_are_taken_by_their_numbers_count_as_tokens(tmp_path: Path, late: bool) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        log_probs, losses = logits.log_softmax(-1), torch.zeros(6)
        for rows in (torch.tensor([1, 2, 4]), torch.tensor([0, 3])):  # of an adaptive softmax's clusters
            own, index = log_probs.index_select(0, rows), labels.index_select(0, rows)
            picked = own[range(len(rows)), index] if late else own.gather(1, index[:, None]).squeeze(1)
            losses.index_copy_(0, rows, -picked)
            log_probs = (2 * logits).log_softmax(-1)
        return losses.sum() / 6

    found = gradients(tmp_path, loss)
    assert sorted(one.num_tokens or 0 for one in found) == [2, 3]
    assert all(one.weight == pytest.approx(1 / 6) for one in found)


@pytest.mark.parametrize("least", ["none", "added", "clamped"])
def test_a_softmaxs_logarithm_is_a_log_softmax(tmp_path: Path, least: str) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        probs = logits.softmax(-1)
        probs = {"none": probs, "added": probs + 1e-9, "clamped": probs.clamp(min=1e-9)}[least]
        return -(probs.log().gather(-1, labels[:, None]).squeeze(-1) * MASK).sum() / 8

    (found,) = gradients(tmp_path, loss)
    assert (found.num_tokens, found.weight) == (4, pytest.approx(1 / 8))


def test_labels_that_are_taken_along_a_dimension_are_picked_as_by_gather(tmp_path: Path) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        picked = torch.take_along_dim(logits.log_softmax(-1), labels[:, None], -1).squeeze(-1)
        return -picked.masked_fill(MASK == 0, 0.0).sum() / 8

    (found,) = gradients(tmp_path, loss)
    assert (found.num_tokens, found.weight) == (4, pytest.approx(1 / 8))
    (told,) = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, Loss)]
    assert (told.op, told.num_labels) == ("log_softmax index", 6)


def test_a_smoothed_loss_of_negated_log_probabilities_is_told_at_the_line_that_picks_them(tmp_path: Path) -> None:
    """As transformers' LabelSmoother computes it."""
    lines = []

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        costs = -logits.log_softmax(-1)
        lines.append(sys._getframe().f_lineno + 1)
        picked = costs.gather(-1, labels[:, None])
        every = costs.sum(-1, keepdim=True)
        return 0.9 * (picked * MASK[:, None]).sum() / 8 + 0.1 * (every * MASK[:, None]).sum() / (8 * 5)

    (found,) = gradients(tmp_path, loss)
    assert (found.num_tokens, found.weight) == (4, pytest.approx(1 / 8))
    (told,) = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, Loss)]
    assert told.site is not None and [told.site.line] == lines


def test_a_declared_loss_is_counted_once(tmp_path: Path) -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        summed = -(logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1) * MASK).sum()
        return gradcheck_dist.mark_loss(summed, 4) / 8

    (found,) = gradients(tmp_path, loss)
    assert (found.num_tokens, found.weight) == (4, pytest.approx(1 / 8))


def test_other_gathers_are_no_losses(tmp_path: Path) -> None:
    (found,) = gradients(tmp_path, lambda logits, labels: logits.gather(-1, labels[:, None]).sum())
    assert found.num_tokens is None


@pytest.mark.parametrize("by_output", [False, True])
def test_a_token_that_an_adaptive_softmax_picks_twice_counts_once(tmp_path: Path, by_output: bool) -> None:
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(5, 12, [4, 8], div_value=1.0)

    def loss(logits: Tensor, _: Tensor) -> Tensor:
        found = adaptive(logits, torch.tensor([0, 5, 9, 11, 3, 7]))
        return -found.output.sum() / 8 if by_output else found.loss

    (found,) = gradients(tmp_path, loss)
    assert (found.num_tokens, found.weight) == (6, pytest.approx(1 / 8 if by_output else 1 / 6))


def test_a_log_softmax_is_known_through_views_and_not_through_arithmetic() -> None:
    log_probs = torch.randn(4, 5, requires_grad=True).log_softmax(-1)
    assert is_log_softmax(log_probs.view(2, 2, 5)[:, :1])
    assert not is_log_softmax(log_probs * 2)
    assert not is_log_softmax(torch.randn(4, 5))


def test_other_logarithms_are_none() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    assert not is_log_softmax(logits.softmax(-1))
    assert not is_log_softmax(logits.sigmoid().log())
    assert not is_log_softmax((logits.softmax(-1) + logits.softmax(0)).log())
    assert not is_log_softmax(logits.softmax(-1).log().log())
