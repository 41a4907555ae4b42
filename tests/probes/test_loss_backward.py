"""Loss functions of somebody's own: what they count, and whether their backward is the derivative of their forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import judged_beside
from elsewhere import pretend
from loss_backward_workers import VARIANTS, derivative
from torch import Tensor, nn
from torch.autograd import Function

from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.events import Loss, ProbeError
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.losses.by_gradient import part_in
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

CLASSES, IGNORED, STEPS = 13, -100, 3


@dataclass(frozen=True)
class Case:
    """How a loss function is written, and how a loop uses it.

    `fused`: it computes the logits, from hidden states and a weight. `over`: what its one result is the sum divided by
    ("nothing", "labels", "number"); "": it gives one number a label. `times`: what its backward multiplies by; None: it
    passes by what arrives. `one`: backward takes one label's gradient for all. `shifted`: by how much its gradient
    takes other labels. `loop`: what the loop multiplies the loss by beside 1 / tokens of the step; `masked`: it leaves
    out every third label by a weight. `for_weight`: what the weight's gradient is multiplied by beside that; None: it
    passes by what arrives. `spoils`: backward uses the memory of the hidden states for something else.
    """

    fused: bool = False
    over: str = ""
    times: float | None = 1.0
    loop: float = 1.0
    smoothing: float = 0.0
    shifted: int = 0
    dtype: torch.dtype = torch.float32
    in_place: bool = False
    bias: bool = False
    masked: bool = False
    one: bool = False
    for_weight: float | None = 1.0
    spoils: bool = False


class Losses(Function):
    """A cross-entropy as `case` writes it."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        ignored: int,
        items: int,
        case: Case,
    ) -> Tensor:
        logits = rows if weight is None else rows @ weight.T
        logits = (logits if bias is None else logits + bias).float()
        valid = labels != ignored
        losses = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none", label_smoothing=case.smoothing)
        of_labels = (labels + case.shifted) % CLASSES
        gradient = derivative(logits, logits.logsumexp(-1), of_labels, valid)
        wanted = F.one_hot(of_labels.clamp(min=0), CLASSES)
        gradient = (gradient + case.smoothing * (wanted - 1 / CLASSES)) * valid[:, None]
        divisor = {"": 1, "nothing": 1, "labels": int(valid.sum()), "number": items}[case.over]
        ctx.case, ctx.has_bias = case, bias is not None
        ctx.save_for_backward(rows, weight, gradient / divisor)
        if case.in_place:
            rows.detach().copy_(gradient)
        return losses.sum() / divisor if case.over else losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        rows, weight, gradient = ctx.saved_tensors
        grad = torch.ones_like(grad) if ctx.case.times is None else grad * ctx.case.times
        grad = grad[-1].expand(len(grad)) if ctx.case.one else grad
        gradient = (gradient * grad.reshape(-1, 1)).to(rows.dtype)
        of_bias = gradient.sum(0) if ctx.has_bias else None
        by = ctx.case.for_weight
        by_itself = gradient * by if by is not None else ctx.saved_tensors[2].to(rows.dtype)
        if weight is None:
            return gradient, None, of_bias, None, None, None, None
        given = gradient @ weight, by_itself.T @ rows
        if ctx.case.spoils:
            rows.numpy()[:] *= 2
        return *given, of_bias, None, None, None, None


def loss_of(case: Case, hidden: Tensor, head: nn.Linear, labels: Tensor, num_tokens: int) -> Tensor:
    """The sum of a microbatch's losses over the tokens of the step, times what the loop adds to that."""
    rows = hidden if case.fused else head(hidden)
    weight, bias = (head.weight, head.bias) if case.fused else (None, None)
    found: Tensor = Losses.apply(rows, weight, bias, labels, IGNORED, num_tokens, case)
    count = int((labels != IGNORED).sum())
    back = {"": 1 / num_tokens, "nothing": 1 / num_tokens, "labels": count / num_tokens, "number": 1.0}[case.over]
    return (found * back * case.loop * kept(case, labels)).sum()


def kept(case: Case, labels: Tensor) -> Tensor:
    """Which labels have a loss that counts."""
    by_loop = torch.arange(len(labels)) % 3 != 0 if case.masked else torch.tensor(True)
    return by_loop & (labels != IGNORED) if not case.over else torch.tensor(1.0)


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


def judged(
    folder: Path,
    case: Case,
    *,
    steps: range | None = range(STEPS),
    every_step: bool = False,
    zeros: bool = False,
    begins_with_zeros: bool = False,
    verify: bool = False,
) -> Report:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(CLASSES, 16), nn.Linear(16, 16), nn.Tanh()).to(case.dtype)
    model = nn.ModuleDict({"body": body, "head": nn.Linear(16, CLASSES, bias=case.bias).to(case.dtype)})
    if zeros or begins_with_zeros:
        nn.init.zeros_(model["head"].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if zeros else 20.0 if begins_with_zeros else 0.1)
    with attach(folder / "run", objective="global-token-mean", steps=steps, every_step=every_step, verify=verify):
        for _ in range(STEPS):
            batches = [torch.randint(CLASSES, (2, size)) for size in (17, 5, 9)]
            for _, labels in batches:
                labels[:2] = IGNORED
            num_tokens = sum(int(((labels != IGNORED) & (kept(case, labels) > 0)).sum()) for _, labels in batches)
            for words, labels in batches:
                loss_of(case, model["body"](words), model["head"], labels, num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [event for event in read_run(folder / "run").ranks[0].events if isinstance(event, ProbeError)]
    return diagnose_run(folder / "run")


class InMixedPrecision(Function):
    """A sum of cross-entropies that is computed in float32, whatever surrounds it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, spoils: bool) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            logits = rows.float() @ weight.T
            gradient = logits.softmax(-1) - F.one_hot(labels, CLASSES)
            ctx.save_for_backward(gradient @ weight, gradient.T @ rows.float())
            loss = F.cross_entropy(logits, labels, reduction="sum")
        if spoils:
            rows.detach().zero_()
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        of_rows, of_weight = ctx.saved_tensors
        return of_rows * grad, of_weight * grad, None, None


def in_mixed_precision(folder: Path, spoiled: set[int]) -> Report:
    """Two steps of three passes; in some of them the function writes over what it was given."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Embedding(CLASSES, 16), nn.LayerNorm(16)), nn.Linear(16, CLASSES, bias=False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with attach(folder, objective="global-token-mean"):
        for _ in range(2):
            for place, size in enumerate((17, 5, 9)):
                words, labels = torch.randint(CLASSES, (2, size))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = InMixedPrecision.apply(body(words), head.weight, labels, place in spoiled)
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


def only(report: Report) -> Finding:
    (finding,) = report.findings
    assert (finding.code, finding.steps) == ("GS803", [0, 1, 2])
    event = finding.first_event
    assert event is not None and event.file == __file__ and event.line is not None
    assert "def backward" in "".join(Path(__file__).read_text().splitlines()[event.line - 2 : event.line + 1])
    return finding


def test_a_step_whose_logits_are_all_alike_tells_nothing_of_the_others(tmp_path: Path) -> None:
    (finding,) = judged(tmp_path, Case(times=0.25), begins_with_zeros=True).findings
    assert (finding.code, finding.steps) == ("GS803", [1, 2])


RIGHT = {
    "one a label": Case(),
    "fused, one a label": Case(fused=True),
    "fused with a bias": Case(fused=True, bias=True),
    "sum": Case(over="nothing"),
    "fused mean": Case(fused=True, over="labels"),
    "over a number that it is given": Case(fused=True, over="number"),
    "bfloat16": Case(fused=True, over="labels", dtype=torch.bfloat16),
    "one a label, logits written over": Case(in_place=True),
}


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


def test_a_sum_whose_logits_were_written_over_is_not_counted(tmp_path: Path) -> None:
    report = judged(tmp_path, Case(over="nothing", in_place=True))
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("over", ["", "nothing", "labels"])
def test_steps_without_samples_count_as_the_sampled_ones_did(tmp_path: Path, over: str) -> None:
    report = judged(tmp_path, Case(fused=True, over=over), steps=range(1), every_step=True)
    assert report.verdict == "clean", report.reasons


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
    assert report.reasons[0].startswith("what the loss (function Losses) counts is not known"), report.reasons
    losses = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, Loss)]
    told = [event for event in losses if event.op != "cross_entropy"]  # which the function calls
    assert "function Losses" in {event.op for event in told}
    assert {(event.reduction, event.num_tokens, event.num_labels) for event in told} == {("unknown", None, None)}


@pytest.mark.parametrize("over", ["", "nothing"])
def test_a_step_behind_others_that_were_not_recorded_is_counted(tmp_path: Path, over: str) -> None:
    report = judged(tmp_path, Case(over=over), steps=range(2, 3))
    assert report.verdict == "clean", report.reasons


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
