"""Functions of one's own that give one number for all labels: it is known what that is a sum of, over what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elsewhere import pretend
from own_losses import CLASSES, RIGHT, Case, judged, only
from torch import Tensor, nn
from torch.autograd import Function

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run


class InMixedPrecision(Function):
    """A sum of cross-entropies that is computed in float32, whatever surrounds it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, share: float) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            logits = rows.float() @ weight.T
            gradient = logits.softmax(-1) - (1 - share) * F.one_hot(labels, CLASSES) - share / CLASSES
            ctx.save_for_backward(gradient @ weight, gradient.T @ rows.float())
            return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        of_rows, of_weight = ctx.saved_tensors
        return of_rows * grad, of_weight * grad, None, None


def in_mixed_precision(folder: Path, smoothed: set[int]) -> Report:
    """Two steps of three passes; in some of them labels are smoothed, and the sum is none of cross-entropies."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Embedding(CLASSES, 16), nn.LayerNorm(16)), nn.Linear(16, CLASSES, bias=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with attach(folder, objective="global-token-mean"):
        for _ in range(2):
            for place, size in enumerate((17, 5, 9)):
                words, labels = torch.randint(CLASSES, (2, size))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = InMixedPrecision.apply(body(words), head.weight, labels, 0.1 * (place in smoothed))
                (loss / 31).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(folder)


def test_a_sum_is_known_whatever_autocast_makes_of_products(tmp_path: Path) -> None:
    report = in_mixed_precision(tmp_path, set())
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_passes_of_one_function_that_count_nothing_leave_the_others_open(tmp_path: Path) -> None:
    """What the step's tokens are is not known then: those that were counted are too few."""
    report = in_mixed_precision(tmp_path, {1})
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("the number of tokens of some contributions is unknown" in reason for reason in report.reasons)


def test_a_sum_whose_logits_were_written_over_is_not_counted(tmp_path: Path) -> None:
    report = judged(tmp_path, Case(over="nothing", in_place=True))
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("over", ["", "nothing", "labels"])
def test_steps_without_samples_count_as_the_sampled_ones_did(tmp_path: Path, over: str) -> None:
    report = judged(tmp_path, Case(fused=True, over=over), steps=range(1), every_step=True)
    assert report.verdict == "clean", report.reasons


def test_what_a_fused_function_divides_by_shows_in_its_gradient(tmp_path: Path) -> None:
    report = judged(tmp_path / "bfloat16", Case(fused=True, over="own", dtype=torch.bfloat16))
    assert (report.verdict, report.findings) == ("undetermined", [])  # its digits do not tell by which number
    report = judged(tmp_path / "right", Case(fused=True, over="own"))
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    (finding,) = judged(tmp_path / "twice", Case(fused=True, over="own", loop=2.0)).findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(2.0))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_gradient_that_is_no_cross_entropys_tells_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    if elsewhere:
        pretend(monkeypatch)
    for case in (Case(fused=True, over="own", smoothing=0.1), Case(fused=True, over="own", shifted=1)):
        report = judged(tmp_path / str(case.shifted), case)
        assert (report.verdict, report.findings) == ("undetermined", [])
        assert report.reasons[0].startswith("what the loss"), report.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_sum_that_is_too_large_to_be_computed_again_shows_in_its_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("gradcheck_dist.probes.losses.closed_form.MAX_TOTAL", (1, 1))
    if elsewhere:
        pretend(monkeypatch)
    report = judged(tmp_path / "right", Case(fused=True, over="labels", dtype=dtype))
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    (finding,) = judged(tmp_path / "twice", Case(fused=True, over="labels", dtype=dtype, loop=2.0)).findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(2.0, rel=1e-3))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        *((case, None) for case in RIGHT.values()),
        (Case(fused=True, over="labels", times=0.25), 0.25),
        (Case(over="nothing", times=3.0), 3.0),
        (Case(fused=True, over="number", times=3.0, dtype=torch.bfloat16), 3.0),
    ],
)
def test_an_accelerators_answer_may_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, expected: float | None
) -> None:
    pretend(monkeypatch)
    if expected is not None:
        assert only(judged(tmp_path, case)).factor.observed == pytest.approx(expected, rel=5e-3)
        return
    report = judged(tmp_path, case)
    assert report.verdict == "clean", report.reasons
    assert "GS803" in report.rules.passed
    report = judged(tmp_path / "every", case, steps=range(1), every_step=True)
    assert report.verdict == ("undetermined" if case.over == "number" else "clean"), report.reasons


@pytest.mark.parametrize("case", [Case(over="labels", smoothing=0.1, times=2.0), Case(over="nothing", in_place=True)])
def test_an_accelerators_answer_may_be_that_it_is_no_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    pretend(monkeypatch)
    report = judged(tmp_path, case)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "what the loss (function Losses) counts is not known" in report.reasons[0], report.reasons
    losses = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, Loss)]
    told = [event for event in losses if event.op != "cross_entropy"]  # which the function calls
    assert "function Losses" in {event.op for event in told}
    assert {(event.reduction, event.num_tokens, event.num_labels) for event in told} == {("unknown", None, None)}


@pytest.mark.parametrize("over", ["", "nothing"])
def test_a_step_behind_others_that_were_not_recorded_is_counted(tmp_path: Path, over: str) -> None:
    report = judged(tmp_path, Case(over=over), steps=range(2, 3))
    assert report.verdict == "clean", report.reasons
