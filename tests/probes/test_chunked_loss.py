"""A loss in chunks: the head's passes count tokens, and the body gets what they leave at the hidden states."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elsewhere import pretend
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.losses import handed_on
from gradcheck_dist.probes.losses.handed_on import Arrived, Cuts
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch

NUM_CHUNKS, TOKENS = 4, 24


class HandOn(torch.autograd.Function):
    """A loss of which backward gives a gradient that was computed before."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, labels[:, None]).sum()


class OwnLoss(torch.autograd.Function):
    """A cross-entropy of somebody's own, one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        return F.cross_entropy(logits, labels, reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, labels = ctx.saved_tensors
        return grad[:, None] * (logits.softmax(-1) - F.one_hot(labels, logits.shape[-1])), None


def own(logits: Tensor, labels: Tensor) -> Tensor:
    return OwnLoss.apply(logits, labels).sum()  # type: ignore[no-any-return, no-untyped-call]


def trained(
    run_dir: Path,
    *,
    body_divided_by: int = 1,
    head_divided_by: int = 1,
    by_function: bool = False,
    noise: float = 0.0,
    tied: bool = False,
    loss_function: Callable[[Tensor, Tensor], Tensor] = summed,
) -> Report:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 10)
    if tied:
        body, head = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10)), nn.Linear(10, 10)
        head.weight = body[2].weight
    optimizer = torch.optim.SGD(dict.fromkeys([*body.parameters(), *head.parameters()]), lr=0.1)
    with attach(run_dir):
        for _ in range(2):
            optimizer.zero_grad()
            hidden, labels = body(torch.randn(TOKENS, 6)), torch.randint(10, (TOKENS,))
            cut = hidden.detach().requires_grad_()
            for states, chunk in zip(cut.chunk(NUM_CHUNKS), labels.chunk(NUM_CHUNKS), strict=True):
                (loss_function(head(states), chunk) / (TOKENS * head_divided_by)).backward()
            assert cut.grad is not None
            gradient = cut.grad / body_divided_by + noise * torch.randn_like(cut)
            (HandOn.apply(hidden, gradient) / 1).backward() if by_function else hidden.backward(gradient)
            optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("loss_function", [summed, picked, own])
@pytest.mark.parametrize("by_function", [False, True])
def test_a_pass_that_hands_on_what_the_losses_left_has_their_tokens(
    tmp_path: Path, by_function: bool, loss_function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    report = trained(tmp_path, by_function=by_function, loss_function=loss_function)
    assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])
    assert report.coverage.parameters_observed == 4


@pytest.mark.parametrize("by_function", [False, True])
def test_what_is_changed_on_its_way_to_the_body_is_not_called_right(tmp_path: Path, by_function: bool) -> None:
    report = trained(tmp_path, body_divided_by=NUM_CHUNKS, by_function=by_function)
    assert (report.verdict, report.findings) == ("undetermined", [])
    first, second = report.reasons
    assert "2 parameters (0.bias, 0.weight) come only from backward passes that no loss begins" in first
    assert "hands on x 0.25 of the gradient that earlier passes left" in second
    assert "in one pass" in report.next_step


def test_a_gradient_from_elsewhere_has_nobodys_tokens(tmp_path: Path) -> None:
    report = trained(tmp_path, noise=0.1)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "come only from backward passes that no loss begins" in report.reasons[0]


def test_tied_weights_are_not_counted_twice(tmp_path: Path) -> None:
    report = trained(tmp_path, tied=True)
    assert report.findings == []


def test_what_is_wrong_at_the_losses_that_count_is_found_all_the_same(tmp_path: Path) -> None:
    report = trained(tmp_path, head_divided_by=NUM_CHUNKS)
    (finding,) = report.findings  # of the body, too, which is handed what these losses left
    assert (finding.code, finding.units, report.coverage.parameters_observed) == ("GS303", ["all parameters"], 4)


def test_what_is_wrong_with_the_body_alone_is_no_fault_of_the_losses(tmp_path: Path) -> None:
    report = trained(tmp_path, head_divided_by=NUM_CHUNKS, body_divided_by=2)
    (finding,) = report.findings
    assert (finding.code, report.coverage.parameters_observed) == ("GS303", 2)
    assert any("hands on x 0.5" in reason for reason in report.reasons)


def test_a_cut_holds_nothing_behind_the_pass(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    with attach(tmp_path):
        cut = torch.randn(5, 3).requires_grad_()
        F.cross_entropy(model(cut), torch.randint(4, (5,))).backward()
        gone = weakref.ref(cut)
        del cut
        gc.collect()
        assert gone() is None


def test_what_an_earlier_step_left_at_a_cut_is_dropped() -> None:
    """An adversary's input gets a gradient in every step, and nobody hands it on."""
    cuts = Cuts()
    cuts.of_step(0)
    cuts.arrived.append(Arrived(0, 0, torch.ones(3, 3), torch.tensor(True)))
    cuts.of_step(0)
    assert len(cuts.arrived) == 1
    cuts.of_step(1)
    assert (cuts.arrived, cuts.seen) == ([], {})


@pytest.mark.parametrize(("body_divided_by", "told"), [(1.0, None), (3.0, "hands on x 0.333333")])
def test_a_rank_whose_classes_have_no_label_hands_on_what_the_others_do(
    body_divided_by: float, told: str | None, tmp_path: Path
) -> None:
    launch("vocabulary_workers:train_in_chunks", (str(tmp_path / "run"), body_divided_by), 2, timeout_s=100)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined" if told else "clean", [])
    assert told is None or any(told in reason for reason in report.reasons)


@pytest.mark.parametrize("first", ["nothing", "another pass"])
def test_on_an_accelerator_only_the_first_pass_may_hand_on(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it did is told later, so nothing is kept for others: then those are not known."""
    pretend(monkeypatch)
    torch.manual_seed(0)
    body, head, beside = nn.Linear(6, 8), nn.Linear(8, 10), nn.Linear(8, 8)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), *beside.parameters()], lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(2):
                hidden, labels = body(torch.randn(TOKENS, 6)), torch.randint(10, (TOKENS,))
                cut = hidden.detach().requires_grad_()
                for states, chunk in zip(cut.chunk(NUM_CHUNKS), labels.chunk(NUM_CHUNKS), strict=True):
                    (summed(head(states), chunk) / (2 * TOKENS)).backward()
                if first != "nothing":
                    beside(torch.randn(4, 8)).backward(torch.randn(4, 8))
                hidden.backward(cut.grad)
            optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("clean" if first == "nothing" else "undetermined", [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_found_wherever_they_lie(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handed_on, "BLOCK", 64)  # sixteen rows of four at a time
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[10:20] = 0
    rows[5] = 2 * rows[45]  # points the same way
    mask = handed_on._has_one(rows)
    some, there = handed_on._evenly(mask)
    assert some.tolist() == [0, 29, 49] and there
    left = Arrived(0, 0, rows[some].double(), there)
    none = Arrived(0, 1, torch.zeros(3, 4, dtype=torch.float64), torch.tensor(False))
    assert float(handed_on.multiple_of([left, none], rows * 0.5)) == 0.5  # type: ignore[arg-type]
    rows[29] += 1
    assert math.isnan(handed_on.multiple_of([left], rows))  # type: ignore[arg-type]
    assert handed_on._evenly(mask[10:13])[1].item() is False
    assert handed_on._evenly(mask[19:21])[0].tolist() == [1, 1, 1]
