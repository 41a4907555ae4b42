"""Passes that differentiate one forward pass are its losses, one by one, and no accumulation steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Backward
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch

STEPS, NUM, SIZE = 3, 3, 8
Combine = Callable[[Sequence[Tensor], int], Tensor]
"""One gradient of those of two tasks, each laid flat, in a step."""


class Tasks(nn.Module):
    """A body and two tasks, with a head each or with two parts of one."""

    def __init__(self, *, heads: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 6)] if heads else [nn.Linear(16, 10)])

    def forward(self, inputs: Tensor) -> Sequence[Tensor]:
        hidden = self.body(inputs)
        outputs = [head(hidden) for head in self.heads]
        return outputs if len(outputs) > 1 else outputs[0].split([4, 6], dim=1)

    def losses(self, size: int = SIZE) -> list[Tensor]:
        return [
            F.cross_entropy(output, torch.randint(0, output.shape[1], (size,))) for output in self(torch.randn(size, 8))
        ]


def trained(folder: Path, model: nn.Module, gradients: Callable[[int], None]) -> Report:
    """Train with passes that leave a step's gradients in `.grad`, and judge that."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(folder / "run"):
        for step in range(STEPS):
            gradients(step)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(folder / "run")


def first_of_forward(folder: Path) -> list[int | None]:
    """What the passes of the first step were told to share a forward pass with."""
    events = read_run(folder / "run").ranks[0].events
    return [event.first_of_forward for event in events if isinstance(event, Backward) and event.step == 0]


def combined(folder: Path, combine: Combine, *, heads: bool = True) -> Report:
    model = Tasks(heads=heads)
    params = list(model.parameters())

    def gradients(step: int) -> None:
        flat = []
        for loss in model.losses():
            found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True)
            flat.append(torch.cat([one.flatten() for one in found]))
        parts = combine(flat, step).split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param).clone()

    return trained(folder, model, gradients)


def added(flat: Sequence[Tensor], _: int) -> Tensor:
    return flat[0] + flat[1]


def projected(flat: Sequence[Tensor], _: int) -> Tensor:
    """PCGrad's formula, as it is for gradients that point apart."""
    one, other = flat
    dot = one @ other
    return one - dot / (other @ other) * other + other - dot / (one @ one) * one


def least(flat: Sequence[Tensor], _: int) -> Tensor:
    """MGDA: the shortest of all mixtures."""
    way = flat[1] - flat[0]
    share = ((flat[1] @ way) / (way @ way)).clamp(0, 1)
    return share * flat[0] + (1 - share) * flat[1]


def hardly_projected(flat: Sequence[Tensor], _: int) -> Tensor:
    """What PCGrad's formula left of nearly orthogonal gradients on a GPU, whose random numbers are others."""
    return 0.99932 * flat[0] + 0.99934 * flat[1]


def one_of_them(flat: Sequence[Tensor], step: int) -> Tensor:
    return flat[step % 2]


@pytest.mark.parametrize("heads", [True, False])
def test_gradients_of_tasks_that_are_added_up_are_those_of_the_sum(tmp_path: Path, heads: bool) -> None:
    report = combined(tmp_path, added, heads=heads)
    assert (report.verdict, report.findings) == ("clean" if heads else "undetermined", [])
    told = " ".join(report.coverage.notes if heads else report.reasons)
    assert "2 losses of one forward pass" in told
    assert ("taken for tasks" if heads else "2 times too much where they are parts of one batch") in told


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("combine", [projected, hardly_projected, least, one_of_them])
def test_numbers_computed_from_tasks_gradients_accuse_nobody(tmp_path: Path, combine: Combine, heads: bool) -> None:
    report = combined(tmp_path, combine, heads=heads)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("combines their gradients by numbers" in reason for reason in report.reasons)


def last_of_them(flat: Sequence[Tensor], _: int) -> Tensor:
    """What is left where each gradient replaces the one before it."""
    return flat[-1]


@pytest.mark.parametrize(("combine", "told"), [(last_of_them, True), (one_of_them, False), (projected, False)])
def test_a_gradient_that_replaces_the_others_is_told(tmp_path: Path, combine: Combine, told: bool) -> None:
    reasons = combined(tmp_path, combine).reasons
    assert any("has to add instead" in reason for reason in reasons[:1]) is told


@pytest.mark.parametrize("heads", [True, False])
@pytest.mark.parametrize("divisor", [1, NUM])
def test_forward_passes_are_the_accumulation_steps(tmp_path: Path, heads: bool, divisor: int) -> None:
    model = Tasks(heads=heads)

    def gradients(_: int) -> None:
        for _ in range(NUM):
            for loss in model.losses():
                (loss / divisor).backward(retain_graph=True)

    report = trained(tmp_path, model, gradients)
    assert first_of_forward(tmp_path) == [None, 0, None, 2, None, 4]
    if divisor == NUM:
        assert (report.verdict, report.findings) == ("clean" if heads else "undetermined", [])
    else:
        (finding,) = report.findings
        assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")
        assert finding.factor.observed == pytest.approx(NUM)


@pytest.mark.parametrize(("factor", "found"), [(1, []), (2, ["GS000"])])
def test_passes_for_inputs_alone_begin_no_accumulation_step(tmp_path: Path, factor: int, found: list[str]) -> None:
    """Zero bubble: the gradients of all inputs come first, then those of the weights, added up by hand."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))

    def gradients(_: int) -> None:
        inputs = [torch.randn(SIZE, 8, requires_grad=True) for _ in range(NUM)]
        losses = [F.cross_entropy(model(one), torch.randint(0, 6, (SIZE,))) / NUM for one in inputs]
        for one, loss in zip(inputs, losses, strict=True):
            torch.autograd.grad(loss, one, retain_graph=True)
        for loss in losses:
            for param, grad in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                param.grad = grad if param.grad is None else param.grad + factor * grad

    report = trained(tmp_path, model, gradients)
    assert [finding.code for finding in report.findings] == found
    assert first_of_forward(tmp_path) == [None] * NUM


def test_the_coefficient_of_a_task_that_is_emptied_is_no_second_fault(tmp_path: Path) -> None:
    model = Tasks(heads=True)

    def gradients(_: int) -> None:
        for _ in range(NUM):
            beside, loss = model.losses()
            (0.3 * beside / NUM).backward(retain_graph=True)
            model.zero_grad()
            (loss / NUM).backward()

    report = trained(tmp_path, model, gradients)
    assert [finding.code for finding in report.findings] == ["GS401"]
    assert any("weigh x 0.3 and x 1 of a mean" in reason for reason in report.reasons)


@pytest.mark.parametrize(("divisor", "code"), [(NUM, None), (1, "GS303")])
def test_a_clip_by_hand_behind_tasks_is_told_from_what_they_lack(
    tmp_path: Path, divisor: int, code: str | None
) -> None:
    model = Tasks(heads=True)

    def gradients(_: int) -> None:
        for _ in range(NUM):
            for loss in model.losses():
                (loss / divisor).backward(retain_graph=True)
        norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1))

    report = trained(tmp_path, model, gradients)
    assert [finding.code for finding in report.findings] == ([] if code is None else [code])
    assert code is not None or report.verdict == "clean"


def test_a_loss_scale_that_nobody_takes_away_is_no_coefficient_of_tasks(tmp_path: Path) -> None:
    model, scaler = Tasks(heads=True), torch.amp.GradScaler("cpu", init_scale=256.0)

    def gradients(_: int) -> None:
        for loss in model.losses():
            scaler.scale(loss).backward(retain_graph=True)

    (finding,) = trained(tmp_path, model, gradients).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "loss_scale")


def test_a_forward_pass_of_which_nothing_is_left_is_found(tmp_path: Path) -> None:
    model = Tasks(heads=False)

    def gradients(_: int) -> None:
        for _ in range(NUM):
            model.zero_grad()
            for loss in model.losses():
                (loss / NUM).backward(retain_graph=True)

    (finding,) = trained(tmp_path, model, gradients).findings
    assert finding.code == "GS401"


@pytest.mark.parametrize("factor", [1.0, 1 / NUM])
def test_graphs_that_are_kept_in_vain_are_passes_of_their_own(tmp_path: Path, factor: float) -> None:
    """Microbatches of one loop, all of which use casts of the weights that are computed once."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    def gradients(_: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for size in (7, 3, 5):
                outputs, labels = model(torch.randn(size, 8)).float(), torch.randint(0, 5, (size,))
                (factor * F.cross_entropy(outputs, labels, reduction="sum") / 15).backward(retain_graph=True)

    report = trained(tmp_path, model, gradients)
    assert first_of_forward(tmp_path) == [None, None, None]
    assert [finding.code for finding in report.findings] == ([] if factor == 1 else ["GS303"])


def test_chunks_of_a_sequence_through_which_a_state_goes_on_are_passes_of_their_own(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.GRUCell(8, 16), nn.Linear(16, 5)])

    def gradients(_: int) -> None:
        state = torch.zeros(SIZE, 16)
        for _ in range(NUM):
            state = model[0](torch.randn(SIZE, 8), state)
            loss = F.cross_entropy(model[1](state), torch.randint(0, 5, (SIZE,)))
            (loss / NUM).backward(retain_graph=True)

    assert trained(tmp_path, model, gradients).verdict == "clean"
    assert first_of_forward(tmp_path) == [None, None, None]


@pytest.mark.parametrize("divisor", [1, NUM])
def test_parts_of_one_batch_under_one_number_are_no_tasks(tmp_path: Path, divisor: int) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))

    def gradients(_: int) -> None:
        for _ in range(NUM):
            outputs, labels = model(torch.randn(9, 8)), torch.randint(0, 5, (9,))
            for part in (slice(0, 3), slice(3, 9)):
                loss = F.cross_entropy(outputs[part], labels[part], reduction="sum")
                (loss / (9 * NUM) / divisor).backward(retain_graph=True)

    report = trained(tmp_path, model, gradients)
    assert first_of_forward(tmp_path) == [None, 0, None, 2, None, 4]
    assert [one.factor.exact for one in report.findings] == ([] if divisor == 1 else ["1/3"])


@pytest.mark.parametrize(
    ("variant", "codes"),
    [
        ("tasks, averaged", []),
        ("tasks, summed", ["GS104"]),
        ("fisher, averaged", []),
        ("lost, alone", ["GS303", "GS103"]),
    ],
)
def test_ranks_that_differentiate_one_forward_pass_several_times(
    tmp_path: Path, variant: str, codes: list[str]
) -> None:
    """Each task has a line; what is looked at sample by sample adds up to what is read."""
    launch("one_forward_workers:train", (str(tmp_path / "run"), variant), 2, timeout_s=60)
    report = diagnose_run(tmp_path / "run")
    found = [finding for finding in report.findings if finding.severity != "info"]
    assert [finding.code for finding in found] == codes
    assert codes or report.verdict == "clean"
