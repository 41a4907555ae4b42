"""Lines of the trainer's own that scale gradients where they lie: they are found, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elsewhere import pretend
from probe_workers import Net, batch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import GradWrite
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.optimizers.writes import FOREACH, METHODS, NEW_METHODS
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

NUM_BATCHES = 3
MARK = "# here"
"""Behind the line of this file that a finding must name."""


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def train(run_dir: Path, doing: Callable[[nn.Module], None]) -> Report:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(run_dir, objective="global-token-mean"):
        for step in range(2):
            data = [batch(0, NUM_BATCHES * step + k) for k in range(NUM_BATCHES)]
            num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
            for tokens, labels in data:
                logits = model(tokens).flatten(0, 1)
                (F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_tokens).backward()
            doing(model)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def by_operator(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad /= 3  # here


def by_method_of_data(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.data.mul_(1 / 3)  # here


def by_tensor(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.div_(torch.tensor(3.0))  # here


def all_at_once(model: nn.Module) -> None:
    torch._foreach_mul_(gradients(model), 1 / 3)  # here


def in_a_buffer(model: nn.Module) -> None:
    flat = torch.cat([grad.flatten() for grad in gradients(model)])
    flat.div_(3)  # here
    for grad, part in zip(gradients(model), flat.split([grad.numel() for grad in gradients(model)]), strict=True):
        grad.copy_(part.view_as(grad))


def replaced(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad / 3 if param.grad is not None else None  # here


def replaced_by_a_tensor(model: nn.Module) -> None:
    third = torch.tensor(1 / 3)
    for param in model.parameters():
        param.grad = third * param.grad  # here


def replaced_in_data(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.data = grad.data.div(3)  # here


def replaced_later(model: nn.Module) -> None:
    """Beside products that are thrown away, all of them first."""
    made = [(param, (param.grad * 0.5).norm(), param.grad * (1 / 3)) for param in model.parameters()]  # here
    for param, norm, part in made:
        param.grad = part if norm >= 0 else None


def replaced_in_two_goes(model: nn.Module) -> None:
    for param in model.parameters():
        part = param.grad * 4
        part = part / 12  # here
        part *= 3
        part /= 4
        param.grad = (part * 0.75 / 0.75) * (4 / 3)
        param.grad.div_(4)


def copied(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.copy_(grad / 3)  # here


def beside_what_is_undone(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.mul_(8.0)
        grad.div_(8.0)
        grad.div_(3.0)  # here


def line_of(doing: Callable[[nn.Module], None]) -> int:
    first = doing.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, text in enumerate(lines, 1) if number > first and text.endswith(MARK))


@pytest.mark.parametrize(
    "doing",
    [
        *(by_operator, by_method_of_data, by_tensor, all_at_once, in_a_buffer, beside_what_is_undone),
        *(replaced, replaced_by_a_tensor, replaced_in_data, replaced_later, copied),
    ],
)
def test_the_line_that_scales_is_the_culprit(tmp_path: Path, doing: Callable[[nn.Module], None]) -> None:
    (finding,) = train(tmp_path / "run", doing).findings
    event = finding.first_event
    assert finding.code == "GS000" and event is not None
    assert (Path(event.file or "").name, event.line) == (Path(__file__).name, line_of(doing))
    assert (event.kind, event.unrecorded) == ("grad_write", False)
    assert event.nominal_factor == pytest.approx(1 / 3)
    assert finding.factor.expression == "1/accumulation_steps"
    assert "Without it the weights would be right." in finding.explanation


@pytest.mark.parametrize("doing", [by_operator, by_tensor, beside_what_is_undone, replaced, replaced_by_a_tensor])
def test_a_number_that_lies_on_an_accelerator_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: Callable[[nn.Module], None]
) -> None:
    pretend(monkeypatch)
    test_the_line_that_scales_is_the_culprit(tmp_path, doing)


def test_numbers_on_an_accelerator_are_kept_as_they_were_and_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    numbers = torch.tensor([2.0, 4.0, 5.0])

    def changing(model: nn.Module) -> None:
        number = torch.tensor(3.0)
        for grad in gradients(model):
            grad.div_(number)
        number.fill_(7.0)
        for grad in gradients(model):
            grad.mul_(number)
        for place, grad in enumerate(gradients(model)):
            grad.mul_(numbers[place % 3])

    train(tmp_path / "run", changing)
    writes = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, GradWrite)]
    assert [write.factor for write in writes if write.step == 0] == [pytest.approx(1 / 3), 7.0, None]


def replaced_unseen(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.div(param.grad, 3)


def by_either_of_two(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.div_(3)
        grad.mul_(3)
        grad.mul_(1 / 3)


def replaced_unseen_beside_a_norm(model: nn.Module) -> None:
    """A product that is thrown away leaves its memory to what is made next."""
    for param in model.parameters():
        assert (param.grad * (1 / 3)).norm() >= 0
        param.grad = torch.div(param.grad, 3)


@pytest.mark.parametrize("doing", [replaced_unseen, replaced_unseen_beside_a_norm, by_either_of_two])
def test_where_no_one_line_did_it_the_two_events_around_it_are_told(
    tmp_path: Path, doing: Callable[[nn.Module], None]
) -> None:
    (finding,) = train(tmp_path / "run", doing).findings
    event = finding.first_event
    assert event is not None and event.before is not None
    assert (event.kind, event.unrecorded, event.before["kind"]) == ("backward", True, "optimizer_step")


def test_a_scaling_that_the_loss_waits_for_is_right(tmp_path: Path) -> None:
    def undone(model: nn.Module) -> None:
        for grad in gradients(model):
            grad.mul_(5)
            grad.div_(5)

    report = train(tmp_path / "run", undone)
    assert (report.verdict, report.findings) == ("clean", [])
    writes = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, GradWrite)]
    assert {write.factor for write in writes} == {5.0, 0.2}


def test_neighbouring_calls_of_one_line_are_one_event(tmp_path: Path) -> None:
    train(tmp_path / "run", by_operator)
    trace = read_run(tmp_path / "run").ranks[0]
    writes = [event for event in trace.events if isinstance(event, GradWrite)]
    assert [write.step for write in writes] == [0, 1]
    assert {len(trace.param_sets[write.params or 0]) for write in writes} == {len(list(Net().parameters()))}


def test_what_an_optimizer_does_is_not_told(tmp_path: Path) -> None:
    train(tmp_path / "run", lambda model: None)
    assert not [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, GradWrite)]


def test_torchs_methods_are_back_afterwards(tmp_path: Path) -> None:
    own, before = dict(vars(torch.Tensor)), {name: getattr(torch, name) for name in FOREACH}
    with attach(tmp_path / "run"):
        assert all(vars(torch.Tensor)[name] is not own.get(name) for name in (*METHODS, *NEW_METHODS))
    assert dict(vars(torch.Tensor)) == own
    assert {name: getattr(torch, name) for name in FOREACH} == before


def test_who_overrides_torchs_functions_is_given_torchs_own(tmp_path: Path) -> None:
    torchs = torch.Tensor.mul_, torch.Tensor.__itruediv__, torch.Tensor.zero_, torch.gather, torch.Tensor.__mul__
    met = []

    class Listening(BaseTorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            met.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    with attach(tmp_path / "run"):
        tensor = torch.full((3,), 6.0)
        with Listening():
            tensor.mul_(2)
            tensor /= 3
            torch.ones(2).zero_()
            torch.gather(torch.ones(2), 0, torch.tensor([1]))
            tensor * 2
    assert [func for func in met if func in torchs] == list(torchs)
    assert tensor.tolist() == [4.0, 4.0, 4.0]


def test_a_number_that_somebody_wrote_is_no_clip(tmp_path: Path) -> None:
    """Behind a clip that acts a constant leaves a round norm too."""

    def clipped_and_halved(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        for grad in gradients(model):
            grad.mul_(0.25)

    (finding,) = train(tmp_path / "run", clipped_and_halved).findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(0.25))
    assert finding.first_event is not None and finding.first_event.kind == "grad_write"


def test_a_factor_that_is_computed_may_be_a_clip(tmp_path: Path) -> None:
    def clipped(model: nn.Module) -> None:
        norm = float(torch.stack([grad.norm() for grad in gradients(model)]).norm())
        for grad in gradients(model):
            grad.mul_(min(1.0, 0.02 / norm))

    report = train(tmp_path / "run", clipped)
    assert (report.verdict, report.findings) == ("clean", [])


def by_columns(model: nn.Module) -> None:
    for grad in gradients(model):
        grad[:1] = grad[:1] * 2  # here


def by_a_part(model: nn.Module) -> None:
    for grad in gradients(model):
        grad[0].mul_(torch.rand(()))  # here


def by_copies(model: nn.Module) -> None:
    for grad in gradients(model):
        grad.copy_(torch.div(grad, 3))  # here


def by_a_difference(model: nn.Module) -> None:
    for grad in gradients(model):
        grad -= grad * (2 / 3)  # here


def by_a_decay(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.add_(param.data, alpha=0.05)  # here


@pytest.mark.parametrize("doing", [by_columns, by_a_part, by_copies, by_a_difference, by_a_decay])
def test_lines_that_write_something_are_told_beside_the_two_events(
    tmp_path: Path, doing: Callable[[nn.Module], None]
) -> None:
    report = train(tmp_path / "run", doing)
    told = [*report.reasons, *(finding.explanation for finding in report.findings)]
    assert any(f"{Path(__file__).name}:{line_of(doing)} writes to " in words for words in told)
    exact = ["1/3"] if doing in (by_copies, by_a_difference) else []
    assert [finding.factor.exact for finding in report.findings] == exact


def test_a_line_whose_number_is_one_of_degrees_in_one_step_is_told_once(tmp_path: Path) -> None:
    """2 / 8 tokens is 1 / 4 of two passes, which might be a half of the loss's division: told apart from the line."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for sizes in ((5, 6), (4, 4)):
            for size in sizes:
                labels = torch.randint(5, (size,))
                (F.cross_entropy(model(torch.randn(size, 6)), labels) * size).backward()
            for param in model.parameters():
                param.grad *= torch.tensor(2.0) / sum(sizes)  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
    for report in (diagnose(read_run(tmp_path)), diagnose_run(tmp_path)):
        (finding,) = report.findings
        assert (finding.steps, finding.factor.observed) == ([0, 1], pytest.approx(2, rel=1e-4))
        assert finding.first_event is not None and finding.first_event.kind == "grad_write"
