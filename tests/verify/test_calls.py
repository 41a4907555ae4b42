"""Every call of a module is checked by itself, also in checkpoints; what is not checked is told, and who does what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from meant_models import Around
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from verify_models import WIDTH, Scaled, batch, loss_of

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.events import GradientCheck

Body = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """Called with which call it is; `wrong_in` that one its gradient is halved."""

    def __init__(self, wrong_in: int = -1) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.wrong_in = wrong_in

    def forward(self, x: Tensor, call: int) -> Tensor:
        hidden = self.dropout(torch.tanh(self.inner(x)))
        return x + (Scaled.apply(hidden, 0.5) if call == self.wrong_in else hidden)


class ByHand(torch.autograd.Function):
    """A checkpoint; `restores` the random state of forward before it runs again."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, restores: bool, x: Tensor, *params: Tensor) -> Tensor:
        ctx.block, ctx.restores, ctx.params, ctx.state = block, restores, params, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        if ctx.restores:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.block(x, 0)
        return None, None, *torch.autograd.grad(y, (x, *ctx.params), grad)


class WrongMean(torch.autograd.Function):
    """A mean over the last dim whose backward forgets to divide."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.expand(ctx.shape)


def several(times: int) -> Body:
    def body(model: Any, x: Tensor) -> Tensor:
        for call in range(times):
            x = model.block(x, call)
        return x

    return body


def by_hand(restores: bool) -> Body:
    return lambda model, x: ByHand.apply(model.block, restores, x, *model.block.parameters())


def judged(body: Body, folder: Path, wrong_in: int = -1, meant: Sequence[str] = ()) -> Report:
    """Two microbatches of a model whose middle is `body`, with a block in it; verified."""
    model = Around(body)
    model.middle.block = Block(wrong_in)
    with gradcheck_dist.attach(folder, verify=True, meant=meant):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(2):
            tokens, labels = batch(k)
            (loss_of(model(tokens), labels) / 2).backward()
        optimizer.step()
    return gradcheck_dist.diagnose(gradcheck_dist.read_run(folder))


def accused(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == "GS801"]


def checked(folder: Path, module: str) -> set[int]:
    trace = gradcheck_dist.read_run(folder).ranks[0]
    checks = [event for event in trace.events if isinstance(event, GradientCheck) and event.module == module]
    assert {check.outcome for check in checks} == {"right"}
    return {check.call for check in checks}


def test_each_of_several_calls_is_checked(tmp_path: Path) -> None:
    report = judged(several(3), tmp_path / "run")
    assert accused(report) == []
    assert checked(tmp_path / "run", "middle.block.inner") == {0, 1, 2}


def test_the_call_that_is_wrong_is_named(tmp_path: Path) -> None:
    (found,) = accused(judged(several(3), tmp_path / "run", wrong_in=1))
    assert found.pattern.startswith("middle.block in call 1 of 3: ")
    assert found.factor.observed == pytest.approx(0.5)


def test_of_many_calls_the_first_and_the_last_are_checked_and_the_others_told(tmp_path: Path) -> None:
    report = judged(several(11), tmp_path / "run")
    assert checked(tmp_path / "run", "middle.block") == {*range(7), 10}
    left_out = {(one.module, one.name) for one in report.coverage.unverified if one.what == "calls"}
    assert ("middle.block", "calls 7 to 9 of 11") in left_out


def test_what_is_not_checked_is_told(tmp_path: Path) -> None:
    report = judged(lambda model, x: model.a(x) + model.block(x, 0).detach(), tmp_path / "run")
    told = {(one.module, one.what): one for one in report.coverage.unverified}
    assert "not called by itself" in told["middle.b", "module"].reason  # Around has it, this body does not use it
    assert told["middle.b", "parameter"].reason
    assert told["Around", "forward"].name == "1"
    assert any(note.startswith("verify: ") and "modules checked" in note for note in report.coverage.notes)


@pytest.mark.parametrize("reentrant", [True, False])
def test_modules_in_a_checkpoint_are_checked(reentrant: bool, tmp_path: Path) -> None:
    report = judged(lambda model, x: checkpoint(model.block, x, 0, use_reentrant=reentrant), tmp_path / "run")
    assert report.findings == []
    assert checked(tmp_path / "run", "middle.block.inner") == {0}


def test_a_checkpoint_by_hand_that_restores_random_numbers_is_right(tmp_path: Path) -> None:
    report = judged(by_hand(restores=True), tmp_path / "run")
    assert (report.verdict, report.findings) == ("clean", [])
    assert checked(tmp_path / "run", "middle.block.inner") == {0}


def test_a_checkpoint_by_hand_that_does_not_is_found_and_its_module_named(tmp_path: Path) -> None:
    (found,) = accused(judged(by_hand(restores=False), tmp_path / "run"))
    assert found.severity == "error"
    assert found.pattern == "middle.block: run again in backward with other random numbers than in forward"


def test_a_factor_that_may_be_meant_is_told_with_its_lines(tmp_path: Path) -> None:
    body = several(1)
    (found,) = accused(judged(body, tmp_path / "run", wrong_in=0))
    assert found.severity == "warning"
    assert "x 0.5, on the way through Scaled at test_calls.py:" in found.pattern
    assert "written at verify_models.py:" in found.explanation and "hands its input on as it is" in found.explanation
    assert "--meant Scaled" in found.fix
    assert found.first_event is not None and found.first_event.file == __file__


def test_what_was_declared_is_no_finding_and_what_is_not_met_is_told(tmp_path: Path) -> None:
    report = judged(several(1), tmp_path / "run", wrong_in=0, meant=["Scaled", "Nothing"])
    assert [finding.severity for finding in accused(report)] == ["info"]
    assert report.verdict == "clean"
    assert [one.module for one in report.coverage.unverified if one.what == "meant"] == ["Nothing"]


def test_a_function_that_is_wrong_is_named_and_what_is_around_it_checked(tmp_path: Path) -> None:
    report = judged(lambda model, x: model.b(model.a(x) - WrongMean.apply(model.block(x, 0))), tmp_path / "run")
    (found,) = accused(report)
    assert found.severity == "error"
    assert f"x {WIDTH}, on the way through WrongMean at test_calls.py:" in found.pattern
    assert "mend the backward of WrongMean (test_calls.py:" in found.fix.lower().replace("wrongmean", "WrongMean")
    assert not any("a module inside is wrong" in note for note in report.coverage.problems + report.coverage.notes)


def test_a_forward_that_rounds_is_no_finding(tmp_path: Path) -> None:
    """Fake quantisation's own gradient is straight-through: a remark where the differences see a tread of the stairs,
    left open where they cross a step."""

    def body(model: Any, x: Tensor) -> Tensor:
        return model.b(torch.fake_quantize_per_tensor_affine(model.block(x, 0), 0.05, 0, -64, 63))

    report = judged(body, tmp_path / "run")
    assert {finding.severity for finding in accused(report)} <= {"info"}
    assert any("it rounds (as fake quantisation does)" in note for note in report.coverage.notes)
