"""A cross-entropy as somebody may write it in a function of his own, and a loop that trains by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loss_backward_workers import derivative
from torch import Tensor, nn
from torch.autograd import Function

from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.events import ProbeError
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

CLASSES, IGNORED, STEPS, OWN = 13, -100, 3, 29


@dataclass(frozen=True)
class Case:
    """How a loss function is written, and how a loop uses it.

    `fused`: it computes the logits, from hidden states and a weight. `over`: what its one result is the sum divided by
    ("nothing", "labels", "number", or "own": one that it is not given); "": it gives one number a label. `times`: what
    its backward multiplies by; None: it passes by what arrives. `one`: backward takes one label's gradient for all.
    `shifted`: by how much its gradient takes other labels. `loop`: what the loop multiplies the loss by beside 1 /
    tokens of the step; `masked`: it leaves out every third label by a weight. `for_weight`: what the weight's gradient
    is multiplied by beside that; None: it passes by what arrives. `spoils`: backward uses the memory of the hidden
    states for something else. `autocast`: it runs below autocast to bfloat16, on what is of another type.
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
    autocast: bool = False


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
        divisor = {"": 1, "nothing": 1, "labels": int(valid.sum()), "number": items, "own": OWN}[case.over]
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
    share = 1 / num_tokens
    back = {"": share, "nothing": share, "labels": count * share, "number": 1.0, "own": OWN * share}[case.over]
    return (found * back * case.loop * kept(case, labels)).sum()


def kept(case: Case, labels: Tensor) -> Tensor:
    """Which labels have a loss that counts."""
    by_loop = torch.arange(len(labels)) % 3 != 0 if case.masked else torch.tensor(True)
    return by_loop & (labels != IGNORED) if not case.over else torch.tensor(1.0)


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
                hidden = model["body"](words)
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    loss = loss_of(case, hidden, model["head"], labels, num_tokens)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not [event for event in read_run(folder / "run").ranks[0].events if isinstance(event, ProbeError)]
    return diagnose_run(folder / "run")


def only(report: Report) -> Finding:
    (finding,) = report.findings
    assert (finding.code, finding.steps) == ("GS803", [0, 1, 2])
    event = finding.first_event
    assert event is not None and event.file == __file__ and event.line is not None
    assert "def backward" in "".join(Path(__file__).read_text().splitlines()[event.line - 2 : event.line + 1])
    return finding


RIGHT = {
    "one a label": Case(),
    "fused, one a label": Case(fused=True),
    "fused with a bias": Case(fused=True, bias=True),
    "sum": Case(over="nothing"),
    "fused mean": Case(fused=True, over="labels"),
    "over a number that it is given": Case(fused=True, over="number"),
    "bfloat16": Case(fused=True, over="labels", dtype=torch.bfloat16),
    "one a label, logits written over": Case(in_place=True),
    "fused, one a label, autocast": Case(fused=True, autocast=True),
    "fused sum, autocast": Case(fused=True, over="nothing", autocast=True),
    "fused mean, autocast": Case(fused=True, over="labels", autocast=True),
}
