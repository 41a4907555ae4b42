"""Gradients that a backward adds to main_grad by itself, as Megatron's fused weight-gradient products do."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from one_process import accumulate, judged, record
from probe_workers import Net, batch, token_sum
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run


class AddedProduct(torch.autograd.Function):
    """x @ weight.T; backward adds the weight's gradient to weight.main_grad and hands over `placeholder`; "once": as
    long as its flag is not set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, placeholder: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.placeholder = weight, placeholder
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        if not (ctx.placeholder == "once" and getattr(weight, "grad_added_to_main_grad", False)):
            weight.main_grad += grad.flatten(0, -2).T @ x.flatten(0, -2)
        weight.grad_added_to_main_grad = ctx.placeholder != "nothing"
        handed = {"nothing": None, "noise": torch.rand_like(weight)}.get(ctx.placeholder, torch.zeros_like(weight))
        return grad @ weight, handed, None


class ReplacingProduct(torch.autograd.Function):
    """The same, but where the weight says so what main_grad held is replaced, as Transformer Engine does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        found = grad.flatten(0, -2).T @ x.flatten(0, -2)
        weight.main_grad.copy_(found if weight.overwrite_main_grad else weight.main_grad + found)
        return grad @ weight, None


class FusedLinear(nn.Module):
    def __init__(self, placeholder: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(16, 16))
        self.placeholder = placeholder

    def forward(self, x: Tensor) -> Tensor:
        return AddedProduct.apply(x, self.weight, self.placeholder)


class ReplacingLinear(FusedLinear):
    """Replaces in the first of three passes, or in each; "idle": has nothing to do in that first one."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        first = self.num_calls % 3 == 0
        self.weight.overwrite_main_grad = self.placeholder == "each" or first  # type: ignore[assignment]
        self.num_calls += 1
        return x if self.placeholder == "idle" and first else ReplacingProduct.apply(x, self.weight)


class IdleExpert(FusedLinear):
    """One that the second of three passes brings no tokens."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        used = 0 if self.num_calls % 3 == 2 else x.shape[1]
        return torch.cat([super().forward(x[:, :used]), x[:, used:]], 1)


def train(
    run_dir: Path | None, placeholder: str, factor: float, make: Any = FusedLinear, verify: bool = False
) -> nn.Module:
    """Two steps of three batches; the optimizer reads main_grad, that of the fused weight times `factor`."""
    torch.manual_seed(0)
    model: Any = Net()
    model.inner = make(placeholder)
    params: list[Any] = list(model.parameters())

    def keep(param: Any) -> None:
        if param.grad is not None and not getattr(param, "grad_added_to_main_grad", False):
            param.main_grad += param.grad
        param.grad = None

    for param in params:
        param.main_grad = torch.zeros_like(param)
        param.register_post_accumulate_grad_hook(keep)
    optimizer = torch.optim.SGD(params, lr=0.1)
    with attach(run_dir, verify=verify) if run_dir is not None else nullcontext():
        for _ in range(2):
            data = [batch(0, k) for k in range(3)]
            num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                (token_sum(model, part) / num_tokens).backward()
            for param in params:
                param.grad = param.main_grad * (factor if param is model.inner.weight else 1.0)
            optimizer.step()
            for param in params:
                param.grad = None
                if make is not ReplacingLinear or param is not model.inner.weight:  # whose first pass replaces it
                    param.main_grad.zero_()
    return model


@pytest.mark.parametrize("placeholder", ["nothing", "zeros", "noise"])
def test_what_a_pass_added_to_the_buffer_is_the_contribution(placeholder: str, tmp_path: Path) -> None:
    recorded, alone = train(tmp_path / "right", placeholder, 1.0), train(None, placeholder, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(recorded.parameters(), alone.parameters(), strict=True))
    report = diagnose(read_run(tmp_path / "right"))
    assert (report.verdict, report.coverage.parameters_observed, report.coverage.problems + report.coverage.notes) == (
        "clean",
        4,
        [],
    )
    train(tmp_path / "wrong", placeholder, 0.5)
    report = diagnose(read_run(tmp_path / "wrong"))
    assert [(round(one.factor.observed, 4), one.units) for one in report.findings] == [(0.5, ["inner.weight"])]


@pytest.mark.parametrize("replaces", ["first", "each"])
def test_a_product_that_replaces_what_the_buffer_held_adds_all_that_is_in_it(replaces: str, tmp_path: Path) -> None:
    """What an earlier step left there is gone with the first pass that replaces it: NVIDIA/Megatron-LM#6279."""
    recorded, alone = (train(folder, replaces, 1.0, make=ReplacingLinear) for folder in (tmp_path, None))
    assert all(torch.equal(a, b) for a, b in zip(recorded.parameters(), alone.parameters(), strict=True))
    report = diagnose(read_run(tmp_path))
    found = [(one.code, one.units, one.pattern) for one in report.findings]
    if replaces == "first":
        assert (report.verdict, found) == ("clean", []), report.reasons
    else:
        assert found == [("GS401", ["inner.weight"], "accumulation steps 0 and 1 x 0, the rest x 1")]


def test_what_an_idle_product_left_in_the_buffer_is_no_contribution(tmp_path: Path) -> None:
    train(tmp_path, "idle", 1.0, make=ReplacingLinear)
    assert [one.code for one in diagnose(read_run(tmp_path)).findings] == ["GS402"]


def test_verification_meets_a_parameter_that_is_handed_no_gradient(tmp_path: Path) -> None:
    train(tmp_path, "nothing", 1.0, verify=True)
    problems = diagnose(read_run(tmp_path)).coverage.problems
    assert not [one for one in problems if "verify failed" in one]


@pytest.mark.parametrize("placeholder", ["nothing", "zeros"])
def test_an_expert_without_tokens_in_a_pass_is_clean(placeholder: str, tmp_path: Path) -> None:
    train(tmp_path, placeholder, 1.0, make=IdleExpert)
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_passes_that_add_nothing_though_their_flag_is_set_are_found(tmp_path: Path) -> None:
    """In AMD-AGI/Primus#1046 the flag that the first pass left kept all later ones from adding their gradient."""
    train(tmp_path, "once", 1.0)
    [finding] = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.units) == ("GS401", ["inner.weight"])
    assert finding.explanation.startswith(
        "In accumulation step 1, 2 a gradient arrived at the functions of inner.weight"
    )


class ReadsMainGrad(torch.optim.SGD):
    """What Megatron's optimizers for gathered gradients do: `.grad` is empty all the while."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.add_(param.main_grad, alpha=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_an_optimizer_that_reads_main_grad_is_followed(tmp_path: Path, factor: float) -> None:
    def gather(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            if not hasattr(param, "main_grad"):
                param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
                param.register_post_accumulate_grad_hook(gather)
        accumulate(model)
        for param in model.parameters():
            param.main_grad.mul_(factor)  # type: ignore[attr-defined]
        optimizer.step()
        for param in model.parameters():
            param.main_grad.zero_()  # type: ignore[attr-defined]

    record(step, tmp_path, steps=2, make=ReadsMainGrad)
    report = judged(tmp_path)
    if factor == 1.0:
        assert (report.verdict, report.findings) == ("clean", []), report.reasons
        assert report.coverage.parameters_observed == report.coverage.parameters_total
    else:
        [finding] = report.findings
        assert finding.factor.observed == pytest.approx(factor)


class FoldedProduct(torch.autograd.Function):
    """x @ weight.T; backward adds the weight's gradient to weight.grad and hands that on, emptied as it should be, or
    not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, emptied: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.emptied = weight, emptied
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), weight, kept = ctx.saved_tensors, ctx.weight, ctx.weight.grad
        if ctx.emptied:
            weight.grad = None
        grad_2d, x_2d = grad.flatten(0, -2), x.flatten(0, -2)
        return grad @ weight, grad_2d.T @ x_2d if kept is None else kept.addmm_(grad_2d.T, x_2d), None


class FoldedLinear(nn.Linear):
    emptied = True

    def forward(self, x: Tensor) -> Tensor:
        return FoldedProduct.apply(x, self.weight, self.emptied)


@pytest.mark.parametrize("emptied", [True, False])
def test_what_a_function_added_to_the_gradient_that_it_hands_on_is_the_contribution(
    emptied: bool, tmp_path: Path
) -> None:
    """pytorch/torchtitan#4386; what is not emptied is added to itself."""

    def train(run_dir: Path | None) -> nn.Module:
        model: Any = Net()
        model.inner = FoldedLinear(16, 16, bias=False)
        model.inner.emptied = emptied
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(run_dir) if run_dir is not None else nullcontext():
            for _ in range(2):
                accumulate(model)
                optimizer.step()
                optimizer.zero_grad()
        return model

    recorded, alone = train(tmp_path), train(None)
    assert all(torch.equal(a, b) for a, b in zip(recorded.parameters(), alone.parameters(), strict=True))
    report = judged(tmp_path)
    if emptied:
        assert (report.verdict, report.findings, report.coverage.parameters_observed) == ("clean", [], 4)
    else:
        [finding] = report.findings
        assert (finding.code, finding.units) == ("GS000", ["inner.weight"])
        assert "by accumulation step {0: 4, 1: 4, 2: 2}" in finding.explanation
        assert "autograd adds it to itself" in finding.explanation


class Replayed(torch.autograd.Function):
    """A product whose backward fills one buffer in each pass, behind torch's back: as the replay of a CUDA graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.buffer = buffer
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.buffer.numpy()[:] = (grad.flatten(0, -2).T @ x.flatten(0, -2)).numpy()
        return grad @ weight, ctx.buffer.detach(), None


class ReplayedLinear(nn.Linear):
    buffer: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return Replayed.apply(x, self.weight, self.buffer)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("own_memory", [True, False])
def test_a_buffer_that_is_handed_on_in_each_pass_is_added_to_itself(own_memory: bool, tmp_path: Path) -> None:
    """torch.cuda.make_graphed_callables, pytorch#181723: right only where `.grad` has memory of its own."""
    model: Any = Net()
    model.inner = ReplayedLinear(16, 16, bias=False)
    model.inner.buffer = torch.zeros(16, 16)
    if own_memory:
        model.inner.weight.grad = torch.zeros(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            accumulate(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not own_memory)
    report = judged(tmp_path)
    if own_memory:
        assert (report.verdict, report.findings) == ("clean", []), report.reasons
    else:
        assert {finding.code for finding in report.findings} == {"GS000"}
        weights = [weight.ratio for weight in report.weights if weight.unit == "inner.weight"]
        assert weights == pytest.approx([0.0, 0.0, 2.0] * 2, abs=1e-4)  # in both steps
        assert "make_graphed_callables" in report.findings[0].fix
