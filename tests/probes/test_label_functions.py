"""Losses that a function of somebody's computes, one for each label."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from framework_workers import TokenLosses, backward_by_hand
from torch import Tensor, nn

import gradcheck_dist
from gradcheck_dist.events import Backward, Event, Loss, LossGradient
from gradcheck_dist.trace.run import read_run

MASK = torch.tensor([1.0, 1, 1, 1, 0, 0])


class LogProbs(TokenLosses):
    """Log-probabilities and entropies in a tuple, as TRL's chunked kernel gives them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, ignored: int) -> Any:  # type: ignore[override]
        log_probs = (hidden @ weight.T).log_softmax(-1)
        ctx.save_for_backward(hidden, weight, labels, log_probs)
        ctx.ignored = ignored
        picked = log_probs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return torch.where(labels == ignored, 0, picked), -(log_probs.exp() * log_probs).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:  # type: ignore[override]
        hidden, weight, labels, log_probs = ctx.saved_tensors
        wanted = torch.nn.functional.one_hot(labels.clamp(min=0), weight.shape[0])
        arrived = (wanted - log_probs.exp()) * (grad * (labels != ctx.ignored))[:, None]
        return arrived @ weight, arrived.T @ hidden, None, None


class Recomputed(torch.autograd.Function):
    """Log-probabilities that keep nothing: backward computes them again, in two chunks, and differentiates these."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        with torch.enable_grad():
            again = logits.detach().requires_grad_()
            parts = zip(again.chunk(2), labels.chunk(2), grad.chunk(2), strict=True)
            for part, chosen, arrived in parts:
                picked = part.log_softmax(-1).gather(-1, chosen[:, None]).squeeze(-1)
                torch.autograd.backward(picked, arrived)
        assert again.grad is not None
        return again.grad, None


class RecomputedLosses(Recomputed):
    """The same, by torch's own cross-entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        with torch.enable_grad():
            again = logits.detach().requires_grad_()
            losses = torch.nn.functional.cross_entropy(again, labels, reduction="none")
        return torch.autograd.grad(losses, again, grad)[0], None


class Gate(torch.autograd.Function):
    """One number for each whole number, deep inside of a model: no loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(scores, chosen)
        return scores.gather(-1, chosen[:, None]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        scores, chosen = ctx.saved_tensors
        return torch.zeros_like(scores).scatter(-1, chosen[:, None], grad[:, None]), None


def events(folder: Path, loss_of: Callable[[Tensor, Tensor], Tensor], start: Callable[[Tensor], None]) -> list[Event]:
    model = nn.Linear(4, 5)
    with gradcheck_dist.attach(folder / "run"):
        start(loss_of(model(torch.randn(6, 4)), torch.randint(5, (6,))))
    found: list[Event] = read_run(folder / "run").ranks[0].events
    return found


def gradients(folder: Path, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[LossGradient]:
    return [event for event in events(folder, loss_of, Tensor.backward) if isinstance(event, LossGradient)]


def ignored(labels: Tensor, label: int) -> Tensor:
    return torch.where(MASK > 0, labels, label)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "masked": lambda logits, labels: (TokenLosses.apply(logits, labels) * MASK).sum() / 8,
    "two dimensions": lambda logits, labels: (
        (TokenLosses.apply(logits.view(2, 3, 5), labels.view(2, 3)) * MASK.view(2, 3)).sum() / 8
    ),
    "log-probabilities": lambda hidden, labels: (
        -LogProbs.apply(hidden, torch.randn(7, 5, requires_grad=True), ignored(labels, -100), -100)[0].sum() / 8
    ),
    "a label that is left out": lambda hidden, labels: (
        -LogProbs.apply(hidden, torch.randn(7, 5, requires_grad=True), ignored(labels, 6), 6)[0].sum() / 8
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_its_tokens_and_their_weight_are_seen(tmp_path: Path, name: str) -> None:
    (found,) = gradients(tmp_path, LOSSES[name])
    assert (found.num_tokens, found.weight) == (4, pytest.approx(1 / 8))
    assert found.weight_min == found.weight_max == pytest.approx(1 / 8)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("chunked", [False, True])
def test_torchs_own_fused_loss_is_known_by_its_tokens(tmp_path: Path, reduction: str, chunked: bool) -> None:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=2) if chunked else None

    def fused(hidden: Tensor, labels: Tensor) -> Tensor:
        weight = torch.randn(7, 5, requires_grad=True)
        loss = torch.nn.functional.linear_cross_entropy(
            hidden, weight, ignored(labels, -100), reduction=reduction, options=options
        )
        return loss if reduction == "mean" else loss.sum() / 8

    found = events(tmp_path, fused, Tensor.backward)
    (gradient,) = [event for event in found if isinstance(event, LossGradient)]
    assert (gradient.num_tokens, gradient.weight) == (4, pytest.approx(1 / 4 if reduction == "mean" else 1 / 8))
    (loss,) = [event for event in found if isinstance(event, Loss)]
    assert not loss.op.startswith("Generated") and ("linear_cross_entropy" in loss.op) == chunked


@pytest.mark.parametrize("function", [Recomputed, RecomputedLosses])
def test_what_it_computes_again_in_backward_is_no_loss_of_its_own(
    tmp_path: Path, function: type[torch.autograd.Function]
) -> None:
    found = events(tmp_path, lambda logits, labels: function.apply(logits, labels).sum() / 8, Tensor.backward)
    (gradient,) = [event for event in found if isinstance(event, LossGradient)]
    assert (gradient.num_tokens, abs(gradient.weight)) == (6, pytest.approx(1 / 8))
    ops = {event.loss_id: event.op for event in found if isinstance(event, Loss)}
    assert ops[gradient.loss_id] == function.__name__


def test_a_loss_behind_such_a_function_is_counted(tmp_path: Path) -> None:
    def start(root: Tensor) -> None:
        root.backward()
        logits = torch.randn(3, 5, requires_grad=True)
        torch.nn.functional.cross_entropy(logits, torch.arange(3)).backward()

    found = events(tmp_path, lambda logits, labels: Recomputed.apply(logits, labels).sum() / 8, start)
    assert [event.num_tokens for event in found if isinstance(event, LossGradient)] == [6, 3]


def test_its_labels_tell_ranks_apart_and_its_line_is_the_users(tmp_path: Path) -> None:
    found = events(tmp_path, LOSSES["masked"], Tensor.backward)
    (loss,) = [event for event in found if isinstance(event, Loss)]
    assert (loss.op, loss.num_labels, loss.label_hash is not None) == ("TokenLosses", 6, True)
    assert loss.site is not None
    assert loss.site.file == __file__


def test_a_function_inside_of_the_model_is_no_loss(tmp_path: Path) -> None:
    out = nn.Linear(1, 5)

    def gated(scores: Tensor, labels: Tensor) -> Tensor:
        gates = Gate.apply(scores, labels)
        return torch.nn.functional.cross_entropy(out(gates[:, None]), labels)

    (found,) = gradients(tmp_path, gated)
    assert (found.num_tokens, found.weight) == (6, pytest.approx(1 / 6))


def test_a_loss_that_is_declared_stands_above_it(tmp_path: Path) -> None:
    def declared(logits: Tensor, labels: Tensor) -> Tensor:
        return gradcheck_dist.mark_loss((TokenLosses.apply(logits, labels) * MASK).sum(), 4) / 8

    (found,) = gradients(tmp_path, declared)
    assert (found.num_tokens, found.weight) == (4, pytest.approx(1 / 8))


def test_an_engine_that_is_started_by_hand_is_one_pass(tmp_path: Path) -> None:
    found = events(tmp_path, LOSSES["masked"], backward_by_hand)
    assert sum(isinstance(event, Backward) for event in found) == 1
    (gradient,) = [event for event in found if isinstance(event, LossGradient)]
    assert gradient.num_tokens == 4


def test_probes_are_taken_away_again(tmp_path: Path) -> None:
    from torch.autograd.variable import Variable

    before = torch.autograd.Function.__dict__["apply"], Variable._execution_engine
    with gradcheck_dist.attach(tmp_path / "run"):
        assert (torch.autograd.Function.__dict__["apply"], Variable._execution_engine) != before
    assert (torch.autograd.Function.__dict__["apply"], Variable._execution_engine) == before


def test_a_compiled_function_runs_as_before(tmp_path: Path) -> None:
    logits, labels = torch.randn(6, 5, requires_grad=True), torch.randint(5, (6,))
    with gradcheck_dist.attach(tmp_path / "run"):
        compiled = torch.compile(lambda x: TokenLosses.apply(x, labels).sum(), backend="eager", fullgraph=True)
        compiled(logits).backward()
    with_probes, logits.grad = logits.grad, None
    TokenLosses.apply(logits, labels).sum().backward()
    assert with_probes is not None
    assert logits.grad is not None
    torch.testing.assert_close(with_probes, logits.grad)
