"""`attach(verify=True)` in one process: right models are not accused, wrong ones named, and no bit is left changed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from verify_models import VOCAB, Model, Scaled, batch, loss_of

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.events import GradientCheck
from gradcheck_dist.verify.calls import Calls
from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.leaves import compare_leaves
from gradcheck_dist.verify.replay import Replay
from gradcheck_dist.verify.twin import Twin


def train(model: nn.Module, run_dir: Path | None, *, steps: int = 3, loss: Any = loss_of) -> list[float]:
    """Two microbatches a step; all parameters and buffers afterwards, and the random states."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    session = gradcheck_dist.attach(run_dir, verify=True, steps=range(2)) if run_dir else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        for k in range(2):
            tokens, labels = batch(2 * step + k)
            (loss(model(tokens), labels) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.detach()
    state = [value.double().flatten() for value in (*model.parameters(), *model.buffers())]
    return [*torch.cat(state).tolist(), float(torch.rand(1)), random.random(), float(np.random.rand())]


def checks(folder: Path) -> list[GradientCheck]:
    events = [event for trace in gradcheck_dist.read_run(folder).ranks.values() for event in trace.events]
    return [event for event in events if isinstance(event, GradientCheck)]


def report(folder: Path) -> Report:
    return gradcheck_dist.diagnose(gradcheck_dist.read_run(folder))


def accusations(folder: Path) -> list[Finding]:
    return [finding for finding in report(folder).findings if finding.code == "GS801"]


def test_a_right_model_is_right_everywhere_and_trains_on_bit_by_bit(tmp_path: Path) -> None:
    verified, alone = Model(), Model()
    assert train(verified, tmp_path / "run") == train(alone, None)
    assert verified.layers[0].history == alone.layers[0].history
    found = checks(tmp_path / "run")
    assert {check.outcome for check in found} == {"right"}
    modules = {check.module for check in found}
    assert {"embedding", "layers.0.up", "layers.1", "layers.1.norm", "norm", "head", "Model"} <= modules
    assert {check.precision.split(",")[0] for check in found if check.target != "leaf"} == {"float64"}
    assert all(abs((check.observed or 0) - (check.numerical or 0)) < 1e-3 for check in found)
    assert {check.step for check in found} == {0}
    judged = report(tmp_path / "run")
    assert "GS801" in judged.rules.passed
    assert not [problem for problem in judged.coverage.problems if "verify" in problem]


@pytest.mark.parametrize(
    ("fault", "factor", "severity", "words"),
    [
        ("scaled", 0.5, "warning", "x 0.5"),
        ("hook", 0.5, "error", "x 0.5"),
        ("ignoring", None, "error", "whatever gradient arrives"),
        ("detached", 0.0, "warning", "no gradient where the output does depend"),
        ("reversed", -1.0, "info", "the other sign on the way through a function"),
    ],
)
def test_a_fault_inside_a_module_is_named(
    fault: str, factor: float | None, severity: str, words: str, tmp_path: Path
) -> None:
    assert train(Model(fault), tmp_path / "run") == train(Model(fault), None)
    (found,) = accusations(tmp_path / "run")
    assert found.name == "wrong-backward" and found.severity == severity
    assert found.factor.observed == (None if factor is None else pytest.approx(factor, abs=1e-6))
    assert found.pattern.startswith("layers.1: the parameters of ") and words in found.pattern
    assert found.first_event is not None and Path(str(found.first_event.file)).name == "verify_models.py"
    assert found.first_event.function == "Layer.forward"
    assert "layers.1.up.weight" in found.units and not any("layers.0" in unit for unit in found.units)


def test_a_wrong_backward_of_a_norm_is_named_by_the_norm(tmp_path: Path) -> None:
    train(Model("norm"), tmp_path / "run")
    (found,) = accusations(tmp_path / "run")
    assert found.pattern.startswith(
        "layers.1.norm: input 0 gets another gradient than the derivative, on the way through"
    )
    assert "WrongNorm at verify_models.py:" in found.pattern
    assert found.first_event is not None and found.first_event.function == "Norm.forward"


@pytest.mark.parametrize("fault", ["relu", "added loss"])
def test_kinks_and_auxiliary_losses_put_into_backward_are_not_accused(fault: str, tmp_path: Path) -> None:
    train(Model(fault), tmp_path / "run")
    assert {check.outcome for check in checks(tmp_path / "run")} <= {"right", "undetermined"}
    assert report(tmp_path / "run").verdict == "clean"


def test_bfloat16_is_checked_in_float64_and_a_fault_in_it_found(tmp_path: Path) -> None:
    train(Model().bfloat16(), tmp_path / "right")
    assert {check.outcome for check in checks(tmp_path / "right")} == {"right"}
    train(Model("scaled").bfloat16(), tmp_path / "wrong")
    (found,) = accusations(tmp_path / "wrong")
    assert found.factor.observed == pytest.approx(0.5, abs=1e-6)


class Coarse(nn.Module):
    """Computes in bfloat16 whatever it is given, as a kernel for that dtype alone."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(16, 16), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        if weight.dtype == torch.float64:
            raise RuntimeError("no kernel for float64")
        product = F.linear(x.bfloat16(), weight.bfloat16()).to(x.dtype)
        return Scaled.apply(product, self.factor)


@pytest.mark.parametrize(("factor", "outcomes"), [(1.0, {"right", "undetermined"}), (0.5, {"wrong", "undetermined"})])
def test_where_precision_does_not_suffice_that_is_said(factor: float, outcomes: set[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), Coarse(factor), nn.Linear(16, 20))
    train(model, tmp_path / "run")
    found = [check for check in checks(tmp_path / "run") if check.module == "1"]
    assert {check.outcome for check in found} <= outcomes
    assert {check.precision for check in found} == {"float32, bfloat16 inside"}


def test_a_hook_on_a_parameter_is_seen_in_what_training_delivered(tmp_path: Path) -> None:
    model = Model()
    model.head.weight.register_hook(lambda grad: 0.25 * grad)
    train(model, tmp_path / "run")
    (found,) = accusations(tmp_path / "run")
    assert found.factor.observed == pytest.approx(0.25, rel=1e-4)
    assert found.units == ["head.weight"]
    assert "hook" in found.explanation


def test_a_regularizer_outside_of_the_module_is_no_fault(tmp_path: Path) -> None:
    model = Model()

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(logits, labels) + 0.1 * model.head.weight.square().sum()

    train(model, tmp_path / "run", loss=loss)
    assert accusations(tmp_path / "run") == []
    assert any("head.weight" in note and "outside" in note for note in report(tmp_path / "run").coverage.notes)


class Tempered(nn.Module):
    """A model whose logits are multiplied by one trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = Model(), nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens) * self.temperature


def test_one_number_that_is_used_outside_of_the_module_is_no_multiple(tmp_path: Path) -> None:
    model = Tempered()
    train(model, tmp_path / "run", loss=lambda logits, labels: loss_of(logits, labels) + model.temperature.square())
    assert accusations(tmp_path / "run") == []
    assert any("temperature" in note and "outside" in note for note in report(tmp_path / "run").coverage.notes)


def test_a_hook_on_all_parameters_is_seen_in_one_number_too(tmp_path: Path) -> None:
    model = Tempered()
    for param in model.parameters():
        param.register_hook(lambda grad: 0.25 * grad)
    train(model, tmp_path / "run")
    (found,) = accusations(tmp_path / "run")
    assert found.factor.observed == pytest.approx(0.25, rel=1e-4)


def test_a_short_gradient_that_is_nearly_a_multiple_is_none(tmp_path: Path) -> None:
    """A balance loss on the two numbers of a bias leaves them 1 % off, and nearly in line."""
    twin = Twin(nn.Linear(2, 2), {})
    replayed = {"bias": torch.tensor([3.0, 4.0]).double()}
    for trained, outcome in (([3.03, 4.043], "undetermined"), ([3.06, 4.08], "wrong")):
        call = RootCall(twin.root, (), {}, (0, 0))
        call.leaves = {"bias": torch.tensor(trained).double()}
        played = Replay(Calls(twin), replayed, {0}, 2.0**-23, True)
        assert [one.outcome for one in compare_leaves(call, played)] == [outcome]


class Codes(nn.Module):
    """Hands its input on as the nearest code; the codes follow what they stand for, and have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, 16), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x, self.codes[None]).argmin(-1)
        chosen = self.codes[nearest]
        self.codes.data.lerp_(self.codes.data + 0.1, 0.5)
        return x + (chosen - x).detach()


class Halved(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(16, 16), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(self.inner(x), self.factor)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_parameters_without_gradient_that_forward_changes_are_as_they_were(factor: float, tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(VOCAB, 16), Halved(factor), Codes(), nn.Linear(16, VOCAB))

    assert train(model(), tmp_path / "run") == train(model(), None)
    found = [one for one in accusations(tmp_path / "run") if one.severity != "info"]
    assert [one.factor.observed for one in found] == ([] if factor == 1 else [pytest.approx(0.5)])
    assert not any("could be checked" in reason for reason in report(tmp_path / "run").reasons)


class Forces(nn.Module):
    """The derivative of an energy, behind a rounding that hands its gradient straight through."""

    def __init__(self, straight: bool = True) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)
        self.straight = straight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + (x.sign() - x).detach() if self.straight else x
        (force,) = torch.autograd.grad(torch.tanh(self.inner(x)).square().sum(), x, create_graph=True)
        return self.head(force)


@pytest.mark.parametrize("straight", [False, True])
def test_a_forward_that_differentiates_is_not_accused_of_what_it_cuts_off(straight: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    train(Forces(straight), tmp_path / "run")
    assert [one for one in accusations(tmp_path / "run") if one.severity != "info"] == []
    outcomes = {check.outcome for check in checks(tmp_path / "run") if check.module == "Forces"}
    assert outcomes == ({"right", "undetermined"} if straight else {"right"})


class WithoutInput(torch.autograd.Function):
    """A linear layer whose backward forgets its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        return None, grad.flatten(0, -2).T @ ctx.saved_tensors[0].flatten(0, -2)


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + WithoutInput.apply(x, self.weight)


def test_a_function_that_gives_its_input_no_gradient_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    train(nn.Sequential(nn.Embedding(VOCAB, 16), Forgetful(), nn.Linear(16, VOCAB)), tmp_path / "run")
    (found,) = accusations(tmp_path / "run")
    assert "WithoutInput" in found.pattern and report(tmp_path / "run").reasons == []


def test_a_forward_that_depends_on_its_surroundings_is_undetermined(tmp_path: Path) -> None:
    class Moody(nn.Module):
        factor = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return Moody.factor * self.inner(tokens)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        Moody.factor += 1.0
        return loss_of(logits, labels)

    train(Moody(), tmp_path / "run", loss=loss)
    judged = report(tmp_path / "run")
    modules = [check for check in checks(tmp_path / "run") if check.target != "outside"]
    assert {check.outcome for check in modules} == {"undetermined"}
    assert judged.verdict == "undetermined"
    assert any("no module's backward could be checked" in reason for reason in judged.reasons)
    assert any("depends on something" in note for note in judged.coverage.notes)


def test_a_module_that_raises_when_run_again_does_not_harm_training(tmp_path: Path) -> None:
    class Once(Model):
        count = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            Once.count += 1
            if Once.count == 3:
                raise ValueError("only twice a step")
            return super().forward(tokens)

    train(Once(), tmp_path / "run", steps=1)
    (check,) = (check for check in checks(tmp_path / "run") if check.target != "outside")
    assert check.outcome == "undetermined" and "only twice a step" in check.reason


def test_a_loss_module_and_several_outermost_modules(tmp_path: Path) -> None:
    class Halved(nn.Module):
        def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return loss_of(Scaled.apply(logits, 0.5), labels)

    train(Model(), tmp_path / "run", loss=Halved())
    (found,) = accusations(tmp_path / "run")
    assert found.pattern.startswith("Halved: input 0 gets x 0.5, on the way through Scaled at test_verify.py:")


def test_tied_weights_and_checkpointing(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Tied(Model):
        def __init__(self, fault: str) -> None:
            super().__init__(fault)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    train(Tied(""), tmp_path / "right")
    assert {check.name for check in checks(tmp_path / "right") if check.outcome != "right"} == {"norm"}  # not used
    train(Tied("scaled"), tmp_path / "wrong")
    assert [found.factor.observed for found in accusations(tmp_path / "wrong")] == [pytest.approx(0.5, abs=1e-6)]


def test_a_model_that_returns_its_loss_beside_its_logits(tmp_path: Path) -> None:
    class WithLoss(Model):
        def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = super().forward(tokens)
            return {"loss": loss_of(logits, tokens), "logits": logits, "again": logits}

    train(WithLoss(), tmp_path / "run", loss=lambda output, labels: output["loss"])
    assert {check.outcome for check in checks(tmp_path / "run")} == {"right"}
    train(WithLoss(), tmp_path / "both", loss=lambda output, labels: output["loss"] + loss_of(output["logits"], labels))
    assert {check.outcome for check in checks(tmp_path / "both")} == {"right"}


def test_recurrent_modules_keep_a_list_of_their_own(tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.lstm, self.head = nn.Embedding(20, 16), nn.LSTM(16, 16), nn.Linear(16, 20)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.embedding(tokens))[0])

    assert train(Recurrent(), tmp_path / "run") == train(Recurrent(), None)
    found = checks(tmp_path / "run")
    assert {check.outcome for check in found} == {"right"}
    assert {"weight_hh_l0", "bias_ih_l0"} <= {check.name for check in found if check.module == "lstm"}


class Remembering(nn.Module):
    """Keeps what forward changes where torch does not look."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen, self.counts = torch.zeros(2), np.zeros(2)
        self.pair = (torch.zeros(2), random.Random(0))
        self.generators = [torch.Generator().manual_seed(0), np.random.default_rng(0)]

    def forward(self, tokens: Any) -> Any:
        self.seen.data.add_(1)
        self.counts += 1
        self.pair[0].data.add_(self.pair[1].random())
        drawn = torch.rand(1, generator=self.generators[0]) + float(self.generators[1].random())
        return self.model(tokens) * drawn

    @property
    def state(self) -> list[float]:
        drawn = [float(torch.rand(1, generator=self.generators[0])), float(self.generators[1].random())]
        return [*self.seen.tolist(), *self.counts.tolist(), *self.pair[0].tolist(), self.pair[1].random(), *drawn]


def test_what_a_forward_keeps_in_arrays_and_generators_is_put_back(tmp_path: Path) -> None:
    verified, alone = Remembering(Model()), Remembering(Model())
    assert train(verified, tmp_path / "run") == train(alone, None)
    assert verified.state == alone.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["in place", "data"])
def test_a_forward_that_changes_its_own_parameters_is_left_open_and_changes_none(
    way: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    class Normed(nn.Linear):
        def forward(self, x: Any) -> Any:
            if way == "data":
                self.weight.data = F.normalize(self.weight.data, dim=-1)
            else:
                with torch.no_grad():
                    self.weight.div_(self.weight.norm())
            return super().forward(x)

    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(Model(), Normed(VOCAB, VOCAB)).to(dtype)

    assert train(make(), tmp_path / "run") == train(make(), None)
    assert not accusations(tmp_path / "run")
    assert any("changes its own parameters" in check.reason for check in checks(tmp_path / "run"))
