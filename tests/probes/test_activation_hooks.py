"""Hooks on the way from the loss to the parameters, which multiply what comes through."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import judged_beside
from one_process import events_of, judged, record
from probe_workers import batch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import LossGradient, ProbeError
from gradcheck_dist.probes import attach

K = 3


def third(grad: Tensor) -> Tensor:
    return grad / K


def third_in_place(grad: Tensor) -> None:
    grad.div_(K)


def of_logits(logits: Tensor) -> Tensor:
    logits.register_hook(third)
    return logits


def in_place(logits: Tensor) -> Tensor:
    logits.register_hook(third_in_place)
    return logits


def of_both_parts(logits: Tensor) -> Tensor:
    parts = logits.chunk(2)
    for part in parts:
        part.register_hook(third)
    return torch.cat(parts)


class Divides(torch.autograd.Function):
    """Hands its input on, and divides the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, by: int, copies: bool) -> Tensor:
        ctx.by, ctx.copies = by, copies
        return tensor.clone() if copies else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad / ctx.by if ctx.copies else grad.div_(ctx.by), None, None


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def by_function(logits: Tensor, by: int = K, copies: bool = False) -> Tensor:
    return Divides.apply(logits, by, copies)  # type: ignore[no-untyped-call, no-any-return]


def by_copying_function(logits: Tensor) -> Tensor:
    return by_function(logits, copies=True)


def behind_a_function(logits: Tensor) -> Tensor:
    """One part goes through a function that only hands it on, before it is divided as the other is."""
    first, second = logits.chunk(2)
    return torch.cat([by_function(of_logits(first * 1), by=1), by_function(second)])


class OwnTensor(Tensor):
    pass


def of_a_subclass(logits: Tensor) -> Tensor:
    return of_logits(logits.as_subclass(OwnTensor)).as_subclass(Tensor)


def in_bfloat16(logits: Tensor) -> Tensor:
    return of_logits(logits.bfloat16()).float()


def same(tensor: Tensor) -> Tensor:
    return tensor


def trains(
    at_logits: Callable[[Tensor], Tensor] = same, at_loss: Callable[[Tensor], Tensor] = same, times: float = 1.0
) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    """A step of K passes, whose losses are multiplied by `times` before they are divided by all tokens."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = [batch(0, k) for k in range(K)]
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        for tokens, labels in data:
            logits = at_logits(model(tokens).flatten(0, 1))
            loss = at_loss(F.cross_entropy(logits, labels.flatten(), reduction="sum"))
            (loss * times / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    "at_logits, at_loss",
    [
        (of_logits, same),
        (in_place, same),
        (of_both_parts, same),
        (in_bfloat16, same),
        (of_a_subclass, same),
        (same, of_logits),
        (by_function, same),
        (by_copying_function, same),
        (behind_a_function, same),
        (same, by_function),
    ],
    ids=[
        *("logits", "in place", "both parts", "bfloat16", "a subclass", "loss"),
        *("a function", "one that copies", "a function in front", "a function of the loss"),
    ],
)
def test_a_number_behind_the_loss_is_a_part_of_its_weight(
    tmp_path: Path, at_logits: Callable[[Tensor], Tensor], at_loss: Callable[[Tensor], Tensor]
) -> None:
    record(trains(at_logits, at_loss, times=K), tmp_path / "right")
    assert judged(tmp_path / "right").verdict == "clean"

    record(trains(at_logits, at_loss), tmp_path / "wrong")
    (finding,) = judged(tmp_path / "wrong").findings
    assert finding.code == "GS303"
    assert finding.factor.observed == pytest.approx(1 / K, rel=1e-2)


@pytest.mark.parametrize("at_logits", [of_logits, by_function])
def test_the_hook_is_named_beside_the_finding(tmp_path: Path, at_logits: Callable[[Tensor], Tensor]) -> None:
    record(trains(at_logits), tmp_path / "run")
    (told,) = [one for one in judged(tmp_path / "run").coverage.notes if "hooks on activations" in one]
    assert f"{Path(__file__).name}:" in told and "0.333333" in told


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_the_whole_model_count_too(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        handle = model.register_full_backward_pre_hook(lambda _, grads: tuple(map(third, grads)))
        trains(times=K)(model, optimizer)
        handle.remove()

    record(step, tmp_path / "run")
    assert judged(tmp_path / "run").verdict == "clean"


def test_elements_weigh_what_hooks_leave(tmp_path: Path) -> None:
    """A mean squared error, of which nothing is told as it arrives."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, at_logits: Callable[[Tensor], Tensor]) -> None:
        for k in range(K):
            logits = at_logits(model(batch(0, k)[0]))
            F.mse_loss(logits, torch.randn_like(logits)).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(lambda *of: step(*of, of_logits), tmp_path / "divided")
    assert judged(tmp_path / "divided").verdict == "clean"
    record(lambda *of: step(*of, same), tmp_path / "added up")
    assert judged(tmp_path / "added up").verdict != "clean"


@pytest.mark.parametrize("gives", [lambda grad: None, lambda grad: grad, lambda grad: -0.1 * grad])
def test_a_branch_is_the_models_own(tmp_path: Path, gives: Callable[[Tensor], Any]) -> None:
    """A hook that looks, and one that reverses what a part of the ways brings, change no weight."""

    def beside(logits: Tensor) -> Tensor:
        branch = logits * 0.5
        branch.register_hook(gives)
        return logits + branch

    record(trains(beside), tmp_path / "run")
    assert judged(tmp_path / "run").verdict == "clean"
    assert all(event.hooks_factor is None for event in events_of(tmp_path / "run", LossGradient))


def test_the_derivative_of_a_function_is_the_models_own(tmp_path: Path) -> None:
    record(trains(Doubles.apply), tmp_path / "run")
    assert judged(tmp_path / "run").verdict == "clean"


def test_a_branch_behind_what_all_ways_go_through_changes_nothing(tmp_path: Path) -> None:
    def both(logits: Tensor) -> Tensor:
        branch = logits * 0.5
        branch.register_hook(lambda grad: -0.1 * grad)
        return of_logits(logits + branch)

    record(trains(both, times=K), tmp_path / "run")
    assert judged(tmp_path / "run").verdict == "clean"
    (factor,) = {event.hooks_factor for event in events_of(tmp_path / "run", LossGradient)}
    assert factor == pytest.approx(1 / K)


def test_what_is_no_number_changes_no_weight(tmp_path: Path) -> None:
    def clamped(logits: Tensor) -> Tensor:
        logits.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
        return logits

    record(trains(clamped), tmp_path / "run")
    weights = {event.weight for event in events_of(tmp_path / "run", LossGradient)}
    assert len(weights) == 1 and judged(tmp_path / "run").verdict == "clean"


def test_hooks_see_and_give_what_they_do_without_probes(tmp_path: Path) -> None:
    def trained(folder: Path | None) -> tuple[list[float], Tensor]:
        seen: list[float] = []

        def hook(grad: Tensor) -> Tensor:
            seen.append(grad.sum().item())
            return grad * 0.7

        torch.manual_seed(0)
        model = nn.Linear(4, 5)
        with attach(folder) if folder is not None else torch.enable_grad():
            logits = model(torch.ones(6, 4))
            handle = logits.register_hook(hook)
            logits.register_hook(hook)
            F.cross_entropy(logits, torch.arange(6) % 5).backward(retain_graph=True)
            handle.remove()
            F.cross_entropy(logits, torch.arange(6) % 5).backward()
        return seen, model.weight.grad

    plain, recorded = trained(None), trained(tmp_path / "run")
    assert len(plain[0]) == 3
    assert recorded[0] == plain[0] and recorded[1].equal(plain[1])


def test_a_hooked_graph_is_freed(tmp_path: Path) -> None:
    with attach(tmp_path / "run"):
        model = nn.Linear(4, 5)
        logits = model(torch.ones(6, 4))
        logits.register_hook(third)
        held = weakref.ref(logits)
        F.cross_entropy(logits, torch.arange(6) % 5).backward()
        del logits
        assert held() is None


def test_a_loss_that_cannot_be_weighed_is_told_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no factor")

    monkeypatch.setattr("gradcheck_dist.probes.activations.ways.alike", broken)
    record(trains(of_logits), tmp_path / "run")
    assert len(events_of(tmp_path / "run", LossGradient)) == K
    assert {event.message for event in events_of(tmp_path / "run", ProbeError)} == {"RuntimeError: no factor"}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    variants = ["nowhere", "functions on parameters", "hooks around experts"]
    return judged_beside(tmp_path_factory, "scaler_workers:train", variants)


@pytest.mark.parametrize(
    "variant, says",
    [("functions on parameters", "used through Scaled"), ("hooks around experts", "come back through the hook")],
)
def test_what_the_model_divides_experts_by_may_make_up_for_ranks(
    mixtures: dict[str, Report], variant: str, says: str
) -> None:
    report = mixtures[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(says in reason and "by 0.5" in reason.replace("x 0.5", "by 0.5") for reason in report.reasons)


def test_a_sum_in_backward_is_no_number_of_the_losss(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ranks of one batch hold the same gradient, which a sum over them doubles: its line is told, not the loss's, and
    nothing where the loss is half of it."""
    reports = judged_beside(tmp_path_factory, "scaler_workers:train_summed", ["summed", "halved"])
    assert [finding.code for finding in reports["summed"].findings] == ["GS802"]
    assert (reports["halved"].verdict, reports["halved"].findings) == ("undetermined", [])
    assert "x 2, which makes up for it" in reports["halved"].reasons[0]


def test_experts_that_nothing_divides_are_found(mixtures: dict[str, Report]) -> None:
    (finding,) = mixtures["nowhere"].findings
    assert (finding.units, finding.factor.observed) == (["expert.*"], pytest.approx(2))
