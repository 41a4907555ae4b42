"""Terms of a loss that nobody declared: their weight in a step is told, and nobody is accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import LossTerm
from gradcheck_dist.trace.run import read_run

STEPS = 3
LABELS = torch.arange(6) % 5
Loss = Callable[[Tensor, int], Tensor]


def run_of(folder: Path, loss: Loss) -> Report:
    """Two optimizer steps of three backward passes each over as many labels."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_dist.attach(folder):
        for _ in range(2):
            for k in range(STEPS):
                loss(model(torch.randn(6, 4)), k).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(folder))


def main(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, LABELS)


def penalty(logits: Tensor) -> Tensor:
    return 0.01 * logits.abs().mean()


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda x, k: main(x) / STEPS + penalty(x), "mean weighs 0.01 in each of 3 passes, together 0.03"),
        (lambda x, k: (main(x) + penalty(x)) / STEPS, "mean weighs 0.003333 in each of 3 passes, together 0.01"),
        (lambda x, k: main(x) / STEPS - F.mse_loss(x, x.detach() + 1), "mse_loss weighs -1 in each of 3 passes"),
    ],
)
def test_a_term_is_weighed_and_accuses_nobody(tmp_path: Path, loss: Loss, told: str) -> None:
    report = run_of(tmp_path / "run", loss)
    assert (report.verdict, report.findings) == ("clean", [])
    (problem,) = report.coverage.notes  # the same in every step: once
    assert "1 other term beside" in problem and told in problem


@pytest.mark.parametrize(
    "loss",
    [
        lambda main, other: (0.2 * main + other).mean(),  # what DataParallel needed stands in many loops still
        lambda main, other: (0.2 * main + other).reshape(1),
        lambda main, other: torch.nan_to_num(0.2 * main + other),
        lambda main, other: torch.stack([0.2 * main, other]).sum(),
        lambda main, other: torch.cat([0.2 * main[None], other[None]]).sum(),
    ],
)
def test_terms_are_seen_however_they_are_summed(tmp_path: Path, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    report = run_of(tmp_path / "run", lambda x, k: loss(main(x), penalty(x)) / STEPS)
    assert (report.verdict, report.findings) == ("clean", [])
    assert "mean weighs 0.003333 in each of 3 passes, together 0.01" in " ".join(report.coverage.notes)


@pytest.mark.parametrize(
    ("loss", "number", "other"),
    [
        (lambda main, other: (0.2 * main + other)[None].mean(), 0.2, 1.0),
        (lambda main, other: (0.2 * main + other).clamp(max=1e4), 0.2, 1.0),
        (lambda main, other: torch.lerp(other, main, 0.2), 0.2, 0.8),
        (lambda main, other: torch.stack([main, other]).mean(), 0.5, 0.5),
        (lambda main, other: (torch.tensor([0.2, 0.5]) * torch.stack([main, other])).sum(), 0.2, 0.5),
        (lambda main, other: torch.tensor([0.2, 0.5]) @ torch.stack([main, other]), 0.2, 0.5),
        (lambda main, other: torch.tensor([0.2, 0.5]).dot(torch.stack([main, other])), 0.2, 0.5),
    ],
)
def test_a_number_in_a_sum_of_terms_accuses_nobody_however_it_is_written(
    tmp_path: Path, loss: Callable[[Tensor, Tensor], Tensor], number: float, other: float
) -> None:
    report = run_of(tmp_path / "run", lambda x, k: loss(main(x), penalty(x)) / STEPS)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert f"the loss enters backward with x {number:g}: whether this is a coefficient" in report.reasons[0]
    assert f"mean weighs {0.01 * other / STEPS:.4g} in each of 3 passes" in " ".join(report.coverage.notes)


@pytest.mark.parametrize(
    "tokens",
    [
        lambda main, other: 0.3 * main + other,
        lambda main, other: torch.stack([0.3 * main, other]).sum(0),
        lambda main, other: torch.cat([0.3 * main, other]).reshape(2, -1).sum(0),
    ],
)
def test_a_number_beside_another_term_of_each_token_accuses_nobody(
    tmp_path: Path, tokens: Callable[[Tensor, Tensor], Tensor]
) -> None:
    def loss(x: Tensor, k: int) -> Tensor:
        main = F.cross_entropy(x, LABELS, reduction="none")
        return tokens(main, x.logsumexp(-1).square()).mean() / STEPS

    report = run_of(tmp_path / "run", loss)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "the loss enters backward with x 0.3: whether this is a coefficient" in report.reasons[0]


@pytest.mark.parametrize("number", [1.0, 0.1])
def test_a_division_that_lacks_beside_another_term_of_each_token_is_found(tmp_path: Path, number: float) -> None:
    def loss(x: Tensor, k: int) -> Tensor:
        main = F.cross_entropy(x, LABELS, reduction="none")
        return (main + number * x.logsumexp(-1).square()).mean()

    (finding,) = run_of(tmp_path / "run", loss).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize(("divisor", "found"), [(STEPS, []), (1, ["accumulation_steps"])])
def test_losses_that_are_stacked_are_judged_as_those_of_a_sum(tmp_path: Path, divisor: int, found: list[str]) -> None:
    report = run_of(tmp_path / "run", lambda x, k: torch.stack([main(x), 0.1 * main(2 * x)]).sum() / divisor)
    assert [finding.factor.expression for finding in report.findings] == found
    assert report.verdict == ("findings" if found else "clean"), report.reasons


def test_several_terms_are_weighed_apart(tmp_path: Path) -> None:
    def loss(x: Tensor, k: int) -> Tensor:
        return main(x) / STEPS + 0.5 * (x - 1).abs().sum() + 0.25 * x.logsumexp(-1).square().mean()

    report = run_of(tmp_path / "run", loss)
    (problem,) = report.coverage.notes
    assert "sum weighs 0.5 in each of 3 passes, together 1.5" in problem
    assert "mean weighs 0.25 in each of 3 passes, together 0.75" in problem


def test_a_term_that_weighs_otherwise_in_each_pass_has_no_number(tmp_path: Path) -> None:
    report = run_of(tmp_path / "run", lambda x, k: main(x) / STEPS + (k + 1) * x.abs().mean())
    (problem,) = report.coverage.notes
    assert "what they weigh is not judged" in problem
    (trace,) = read_run(tmp_path / "run").ranks.values()
    assert [one.weight for one in trace.events if isinstance(one, LossTerm)] == [1.0, 2.0, 3.0] * 2


def test_a_declared_term_is_not_weighed_twice(tmp_path: Path) -> None:
    def loss(x: Tensor, k: int) -> Tensor:
        penalty = x.abs().sum()
        gradcheck_dist.mark_loss(penalty, 30, term="penalty", coefficient=0.01)
        return main(x) / STEPS + 0.01 * penalty / 30 / STEPS

    report = run_of(tmp_path / "run", loss)
    (trace,) = read_run(tmp_path / "run").ranks.values()
    assert not [one for one in trace.events if isinstance(one, LossTerm)]
    assert (report.verdict, report.coverage.problems + report.coverage.notes) == ("clean", [])


class Attach(torch.autograd.Function):
    """Megatron's and DeepSeek's way: activations as they are, and a loss that gets `scale` in backward."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, term: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return activations.view_as(activations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad, grad.new_full((), ctx.scale), None


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (1.0, "Attach weighs 0.01 in each of 3 passes, together 0.03"),
        (1 / STEPS, "Attach weighs 0.003333 in each of 3 passes, together 0.01"),
    ],
)
def test_a_term_that_a_function_attaches_is_weighed(tmp_path: Path, scale: float, told: str) -> None:
    def loss(x: Tensor, k: int) -> Tensor:
        return main(Attach.apply(x, 0.01 * x.abs().mean(), scale)) / STEPS  # type: ignore[no-untyped-call]

    report = run_of(tmp_path / "run", loss)
    assert (report.verdict, report.findings) == ("clean", [])
    (problem,) = report.coverage.notes
    assert "attaches to activations" in problem and told in problem


def test_a_loss_that_is_handed_on_with_activations_is_not_attached(tmp_path: Path) -> None:
    """As by DDP's sink, through which all outputs of a module go."""

    class HandOn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(tensor.view_as(tensor) for tensor in tensors)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
            return grads

    def loss(x: Tensor, k: int) -> Tensor:
        return HandOn.apply(x, main(x) / STEPS)[1]  # type: ignore[no-untyped-call,no-any-return]

    report = run_of(tmp_path / "run", loss)
    assert (report.verdict, report.coverage.problems + report.coverage.notes) == ("clean", [])


def test_a_scalar_that_scales_activations_is_no_attached_loss(tmp_path: Path) -> None:
    """As a fake quantisation's: what arrives at it is another number in each pass."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, activations: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(activations, scale)
            return activations * scale

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            activations, scale = ctx.saved_tensors
            return grad * scale, (grad * activations).sum()

    def loss(x: Tensor, k: int) -> Tensor:
        return main(Scaled.apply(x, x.abs().max())) / STEPS  # type: ignore[no-untyped-call]

    report = run_of(tmp_path / "run", loss)
    assert (report.verdict, report.coverage.problems + report.coverage.notes) == ("clean", [])


@pytest.mark.parametrize(("number", "found"), [(0.1, []), (6 / 7, ["GS303"])], ids=["written", "a wrong count"])
def test_a_loss_of_a_pass_of_its_own_has_a_coefficient_beside_passes_that_count_nothing(
    tmp_path: Path, number: float, found: list[str]
) -> None:
    """A generator's adversary goes backward first, in microbatches, and a classifier's loss by itself behind them."""
    torch.manual_seed(0)
    model, critic, head = nn.Sequential(nn.Linear(4, 16), nn.Tanh()), nn.Linear(16, 1), nn.Linear(16, 5)
    parts = nn.ModuleList([model, critic, head])
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    with gradcheck_dist.attach(tmp_path / "run"):
        for _ in range(2):
            for _ in range(STEPS):
                (critic(model(torch.randn(6, 4))).mean() / STEPS).backward()
            (number * main(head(model(torch.randn(6, 4))))).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == found
    assert found or any("enters backward with x 0.1: whether this is a coefficient" in one for one in report.reasons)


def test_a_term_is_found_behind_the_outputs_of_a_ddp_module(tmp_path: Path) -> None:
    class WithLoss(nn.Linear):
        """As transformers' models: what forward gives holds the loss and the terms that it is made of."""

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = super().forward(x)
            term = penalty(logits)
            return logits, main(logits) / STEPS + term, term

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with gradcheck_dist.attach(tmp_path / "run"):
            model = nn.parallel.DistributedDataParallel(WithLoss(4, 5), find_unused_parameters=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for k in range(STEPS):
                model.require_backward_grad_sync = k == STEPS - 1
                model(torch.randn(6, 4))[1].backward()
            optimizer.step()
    finally:
        dist.destroy_process_group()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", [])
    assert any("mean weighs 0.01 in each of 3 passes, together 0.03" in one for one in report.coverage.notes)


@pytest.mark.parametrize("number", [0.4, 2.0, 3.0])
def test_one_number_before_each_of_several_losses_may_be_their_coefficient(tmp_path: Path, number: float) -> None:
    """A contrastive loss both ways, each times twice its temperature; also as many times as there are passes."""
    report = run_of(tmp_path / "run", lambda x, _: (number * main(x) + number * main(-x)) / STEPS)
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert f"adds up 2 losses, with {number:g} x before the mean of each" in reason


@pytest.mark.parametrize("mean", [lambda one, other: (one + other) / 2, lambda *both: torch.stack(both).mean()])
def test_means_of_some_losses_each_are_tasks(tmp_path: Path, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Contrastive losses that are averaged over both ways, as many as there are passes (SLIP has two on two ranks)."""

    def added(x: Tensor, _: int) -> Tensor:
        return sum(mean(main(by * x), main(-by * x)) for by in range(1, STEPS + 1)) / STEPS  # type: ignore[return-value]

    report = run_of(tmp_path / "run", added)
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert "adds up 6 losses, with 0.5 x before the mean of each" in reason


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, _: (main(x) / STEPS + main(-x) / STEPS) / STEPS,
        lambda x, _: (main(x) + main(-x)) * 0.4 / STEPS,
        lambda x, k: (0.4 + 0.4 * (k == 1)) * (main(x) + main(-x)) / STEPS,
    ],
)
def test_another_number_than_theirs_is_accused_all_the_same(tmp_path: Path, loss: Loss) -> None:
    assert [finding.code for finding in run_of(tmp_path / "run", loss).findings] in (["GS303"], ["GS000"])


@pytest.mark.parametrize("number", [1 / STEPS, 1.0])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("same", [True, False], ids=["its labels", "labels of its own"])
def test_a_head_that_is_switched_off_by_a_coefficient_weighs_nothing(
    tmp_path: Path, number: float, first: bool, same: bool
) -> None:
    def loss(logits: Tensor, k: int) -> Tensor:
        off = 0.0 * F.cross_entropy(logits.flip(1), LABELS if same else LABELS.flip(0))
        return (off + main(logits) if first else main(logits) + off) * number

    report = run_of(tmp_path / "run", loss)
    assert [finding.code for finding in report.findings] == ([] if number < 1 else ["GS303"])
    assert number == 1 or report.verdict == "clean"
