"""Loss functions of somebody's own: what they count, and whether their backward is the derivative of their forward."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import judged_beside
from loss_backward_workers import VARIANTS
from own_losses import CLASSES, RIGHT, STEPS, Case, judged, only
from torch import Tensor, nn
from torch.autograd import Function

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.losses.by_gradient import part_in
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run


class WithEntropy(Function):
    """Losses, and entropies that a loop may use as well."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = logits.log_softmax(-1)
        ctx.save_for_backward(log_probs, labels)
        return -log_probs.gather(-1, labels[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_entropy: Tensor) -> Any:  # type: ignore[override]
        log_probs, labels = ctx.saved_tensors
        wanted = (log_probs.exp() - F.one_hot(labels, log_probs.shape[-1])) * grad[:, None]
        entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
        return wanted - log_probs.exp() * (log_probs + entropy) * of_entropy[:, None], None


def test_a_step_whose_logits_are_all_alike_tells_nothing_of_the_others(tmp_path: Path) -> None:
    (finding,) = judged(tmp_path, Case(times=0.25), begins_with_zeros=True).findings
    assert (finding.code, finding.steps) == ("GS803", [1, 2])


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_backward_is_clean_and_its_tokens_are_counted(tmp_path: Path, name: str) -> None:
    report = judged(tmp_path, RIGHT[name])
    assert report.verdict == "clean", report.reasons
    assert "GS803" in report.rules.passed
    losses = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, Loss)]
    assert {event.op for event in losses if event.requires_grad} == {"Losses"}


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        (Case(times=2.0), 2.0),
        (Case(times=-1.0), -1.0),
        (Case(fused=True, over="labels", times=0.25), 0.25),
        (Case(fused=True, over="number", times=3.0, dtype=torch.bfloat16), 3.0),
        (Case(in_place=True, times=2.0), 2.0),
        (Case(fused=True, over="number", times=3.0, autocast=True), 3.0),
    ],
)
def test_a_factor_in_backward_is_found(tmp_path: Path, case: Case, factor: float) -> None:
    finding = only(judged(tmp_path, case))
    assert finding.factor.observed == pytest.approx(factor, rel=5e-3)
    assert finding.severity == "error"


@pytest.mark.parametrize("over", ["", "nothing", "labels"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_backward_that_passes_by_what_arrives_is_found(tmp_path: Path, fused: bool, over: str) -> None:
    finding = only(judged(tmp_path, Case(fused=fused, over=over, times=None)))
    assert "passes it by" in finding.explanation
    assert "Multiply" in finding.fix


@pytest.mark.parametrize("times", [1.0, None])
def test_a_backward_that_loses_what_arrives_for_single_labels_is_found(tmp_path: Path, times: float | None) -> None:
    finding = only(judged(tmp_path, Case(masked=True, one=True, times=times)))
    assert "masks" in finding.explanation


@pytest.mark.parametrize("for_weight", [None, 0.5])
@pytest.mark.parametrize(
    ("over", "dtype"),
    [("", torch.float32), ("nothing", torch.float32), ("labels", torch.float32), ("nothing", torch.bfloat16)],
)
def test_a_weight_that_gets_less_than_the_hidden_states_is_found(
    tmp_path: Path, for_weight: float | None, over: str, dtype: torch.dtype
) -> None:
    (finding,) = judged(tmp_path, Case(fused=True, over=over, for_weight=for_weight, dtype=dtype)).findings
    assert finding.code == "GS803"
    assert finding.num_parameters == 1 and "gives unnamed." in finding.pattern
    assert "for the hidden states" in finding.explanation
    assert ("passes by" in finding.explanation) == (for_weight is None)
    if for_weight is not None:
        assert finding.factor.observed == pytest.approx(for_weight, rel=0.02)


@pytest.mark.parametrize("for_weight", [1.0, None])
def test_a_weight_that_is_masked_as_well_is_clean(tmp_path: Path, for_weight: float | None) -> None:
    report = judged(tmp_path, Case(fused=True, masked=True, for_weight=for_weight))
    assert [finding.code for finding in report.findings] == ([] if for_weight else ["GS803"])


def test_hidden_states_that_were_written_over_tell_nothing_of_the_weight(tmp_path: Path) -> None:
    assert judged(tmp_path, Case(fused=True, spoils=True)).verdict == "clean"


def test_a_mask_behind_a_right_backward_is_clean(tmp_path: Path) -> None:
    assert judged(tmp_path, Case(masked=True)).findings == []


def test_verification_tells_the_same_once(tmp_path: Path) -> None:
    only(judged(tmp_path, Case(fused=True, over="nothing", times=None), verify=True))


def test_what_the_loop_makes_up_for_is_no_finding(tmp_path: Path) -> None:
    report = judged(tmp_path, Case(times=0.25, loop=4.0))
    assert (report.verdict, report.findings) == ("clean", [])
    assert any("does not give the derivative" in text for text in report.coverage.notes)


def test_a_loop_that_is_wrong_as_well_is_told_beside_it(tmp_path: Path) -> None:
    report = judged(tmp_path, Case(times=2.0, loop=3.0))
    assert {finding.code for finding in report.findings} == {"GS303", "GS803"}


def test_nothing_shows_while_one_arrives(tmp_path: Path) -> None:
    assert judged(tmp_path, Case(over="number", times=None)).verdict == "clean"


def test_a_gradient_of_another_function_is_a_warning(tmp_path: Path) -> None:
    finding = only(judged(tmp_path, Case(shifted=1)))
    assert finding.severity == "warning"
    assert "no multiple" in finding.explanation


@pytest.mark.parametrize("over", ["", "labels"])
def test_what_is_no_plain_cross_entropy_is_not_judged(tmp_path: Path, over: str) -> None:
    report = judged(tmp_path, Case(over=over, smoothing=0.1, times=2.0))
    assert report.findings == []
    assert "GS803" not in report.rules.passed
    assert report.verdict == ("undetermined" if over else "clean")


@pytest.mark.parametrize("case", [Case(smoothing=0.1), Case(times=2.0)])
def test_logits_that_are_all_alike_convict_nobody(tmp_path: Path, case: Case) -> None:
    """The value of the loss is that of any temperature there, and of any smoothing."""
    report = judged(tmp_path, case, zeros=True)
    assert report.findings == []


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_else_a_function_gives_may_have_a_gradient_too(tmp_path: Path, share: float) -> None:
    model = nn.Linear(8, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run", objective="global-token-mean"):
        for _ in range(STEPS):
            labels = torch.randint(CLASSES, (9,))
            losses, entropies = WithEntropy.apply(4 * model(torch.randn(9, 8)), labels)
            (losses - share * entropies).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose_run(tmp_path / "run")
    assert report.findings == []
    assert ("GS803" in report.rules.passed) == (share == 0)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "loss_backward_workers:train_all", VARIANTS)


def test_shards_of_a_vocabulary_are_held_against_the_derivative(reports: dict[str, Report]) -> None:
    assert reports["vocabulary parallel"].verdict == "clean"
    assert "GS803" in reports["vocabulary parallel"].rules.passed


@pytest.mark.parametrize(
    ("variant", "says"),
    [("summed in backward", "times what arrives"), ("passed by", "passes it by"), ("no mask", "no multiple")],
)
def test_a_wrong_backward_of_shards_is_found(reports: dict[str, Report], variant: str, says: str) -> None:
    (finding,) = reports[f"vocabulary parallel, {variant}"].findings
    assert finding.code == "GS803"
    assert finding.ranks == [0, 1]
    assert says in finding.explanation


@pytest.mark.parametrize("variant", ["own maximum", "averaged denominator"])
def test_a_softmax_over_shards_that_does_not_sum_to_one_leaves_the_verdict_open(
    reports: dict[str, Report], variant: str
) -> None:
    """One wrong value on all ranks, and the derivative of it: what the shards' logits come to is what tells."""
    report = reports[f"vocabulary parallel, {variant}"]
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert "softmax does not sum to 1" in reason
    assert any("sums to 2 over" in text for text in report.coverage.notes) == (variant == "averaged denominator")
    assert "F.cross_entropy" in report.next_step


def test_a_backward_by_a_shards_own_denominator_is_found(reports: dict[str, Report]) -> None:
    (finding,) = reports["vocabulary parallel, backward by its own denominator"].findings
    assert (finding.code, finding.severity, finding.ranks) == ("GS803", "warning", [0, 1])


@pytest.mark.parametrize("variant", ["smoothed labels", "z-loss"])
def test_another_loss_over_shards_is_not_judged_by_its_softmax(reports: dict[str, Report], variant: str) -> None:
    report = reports[f"vocabulary parallel, {variant}"]
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_a_sum_over_shards_is_known_by_its_gradient(reports: dict[str, Report]) -> None:
    report = reports["vocabulary parallel, one sum"]
    assert (report.verdict, report.findings, report.coverage.problems + report.coverage.notes) == ("clean", [], []), (
        report.reasons
    )
    (finding,) = reports["vocabulary parallel, one sum, summed in backward"].findings
    assert finding.code == "GS303"
    assert finding.factor.observed == pytest.approx(2, rel=1e-4)


@pytest.mark.parametrize("variant", ["with a learned weight", "smoothed"])
def test_a_sum_over_shards_of_something_else_is_left_open(reports: dict[str, Report], variant: str) -> None:
    report = reports[f"vocabulary parallel, one sum, {variant}"]
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_shard_without_labels_has_the_weight_that_another_rank_knows(reports: dict[str, Report]) -> None:
    report = reports["vocabulary parallel, one sum, labels in one shard"]
    assert (report.verdict, report.findings, report.coverage.problems + report.coverage.notes) == ("clean", [], []), (
        report.reasons
    )
    (finding,) = reports["vocabulary parallel, one sum, labels in one shard, summed in backward"].findings
    assert finding.code == "GS303"
    assert finding.factor.observed == pytest.approx(2, rel=1e-4)
    report = reports["vocabulary parallel, one sum, labels in one shard, another scale in the other"]
    assert (report.verdict, report.findings) == ("undetermined", [])


def softmax_gradient(scores: Tensor, labels: Tensor, weights: Tensor | float) -> Tensor:
    wanted = F.one_hot(labels, scores.shape[-1])
    return (scores.double().softmax(-1) - wanted) * torch.as_tensor(weights).reshape(-1, 1)


@pytest.mark.parametrize("start", [0, 7])
def test_the_weight_stands_in_the_gradient_of_a_part_of_the_classes(start: int) -> None:
    torch.manual_seed(1)
    scores, labels = torch.randn(40, 21).double(), torch.randint(21, (40,))
    gradient = softmax_gradient(scores, labels, 0.125)
    part = slice(start, start + 7)
    assert weight_in(gradient[:, part], scores[:, part], labels) == pytest.approx(0.125)
    labels[::2], gradient[::2] = -100, 0  # they learn nothing
    assert weight_in(gradient[:, part], scores[:, part], labels) == pytest.approx(0.125)


def test_a_part_without_labels_has_the_multiple_of_all_parts() -> None:
    torch.manual_seed(1)
    scores, labels = torch.randn(40, 21).double(), torch.randint(7, (40,))
    gradient = softmax_gradient(scores, labels, 0.125)
    parts = [part_in(gradient[:, part], scores[:, part], labels, 1e-6) for part in (slice(7), slice(7, 21))]
    assert [part is not None and part.weight for part in parts] == [pytest.approx(0.125), None]
    scale = math.log(0.125) - float(scores.logsumexp(1).mean())
    assert [part is not None and part.scale for part in parts] == [pytest.approx(scale)] * 2


def weight_in(gradient: Tensor, scores: Tensor, labels: Tensor) -> float | None:
    part = part_in(gradient, scores, labels, 1e-6)
    return part.weight if part is not None else None


def test_another_gradient_has_no_weight_in_it() -> None:
    torch.manual_seed(1)
    scores, labels = torch.randn(40, 7).double(), torch.randint(7, (40,))
    right = softmax_gradient(scores, labels, 0.125)
    others = {
        "weights of their own": softmax_gradient(scores, labels, torch.rand(40)),
        "another temperature": softmax_gradient(2 * scores, labels, 0.125),
        "other labels": softmax_gradient(scores, torch.randint(7, (40,)), 0.125),
        "smoothed": right + 0.0125 * (F.one_hot(labels, 7) - 1 / 7),
        "noise": torch.randn(40, 7).double(),
        "nothing": torch.zeros(40, 7).double(),
        "more than all": right + 0.125 * scores.softmax(-1),
    }
    found = {name: weight_in(gradient, scores, labels) for name, gradient in others.items()}
    assert found == dict.fromkeys(others)


def test_a_scale_that_belongs_to_a_divided_loss_is_clean(reports: dict[str, Report]) -> None:
    report = reports["vocabulary parallel, scaled in backward for a divided loss"]
    assert (report.verdict, report.findings) == ("clean", [])
