"""Steps that are not recorded: the backward passes that begin in them are counted, and an unusual window is told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Backward, StepEnd, Unrecorded
from gradcheck_dist.trace.run import read_run

USUAL = 3
WINDOWS = (3, 3, 3, 2, 3, 3, 3, 2)


def train(
    windows: Sequence[int], divisors: Sequence[int] | None = None, *, again: bool = False, by_hand: bool = False
) -> None:
    """Steps of so many passes, each loss divided by USUAL, or by the step's divisor. `again`: a reentrant checkpoint,
    which runs backward inside of backward. `by_hand`: a line multiplies gradients by passes / USUAL."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16)
    optimizer = torch.optim.SGD([*embedding.parameters(), *head.parameters()], lr=0.1)

    def logits(tokens: Tensor) -> Tensor:
        hidden = embedding(tokens)
        return checkpoint(head, hidden, use_reentrant=True) if again else head(hidden)

    for step, passes in enumerate(windows):
        for _ in range(passes):
            tokens, labels = torch.randint(0, 16, (2, 5))
            loss = F.cross_entropy(logits(tokens), labels)
            (loss / (divisors[step] if divisors else USUAL)).backward()
        torch.autograd.grad(head(embedding(tokens)).sum(), embedding.weight)  # a look that leaves nothing behind
        for param in [embedding.weight, *head.parameters()] if by_hand else ():
            assert param.grad is not None
            param.grad.mul_(passes / USUAL)
        optimizer.step()
        optimizer.zero_grad()


def judged(folder: Path, steps: set[int], divisors: Sequence[int] | None = None, *, by_hand: bool = False) -> Report:
    with gradcheck_dist.attach(folder, steps=steps):
        train(WINDOWS, divisors, by_hand=by_hand)
    return gradcheck_dist.diagnose(folder)


@pytest.mark.parametrize("again", [False, True])
def test_passes_of_steps_that_are_not_recorded_are_counted(again: bool, tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run", steps={0, 4, 100}):
        train(WINDOWS, again=again)
    events = read_run(tmp_path / "run").ranks[0].events
    assert [event.num_passes for event in events if isinstance(event, StepEnd)] == [3, 3]
    told = [(one.num_passes, one.first_step, one.num_steps) for one in events if isinstance(one, Unrecorded)]
    assert told == [(3, 1, 2), (2, 3, 1), (3, 5, 2), (2, 7, 1)]


def test_steps_that_training_did_not_reach_are_told_from_none(tmp_path: Path) -> None:
    report = judged(tmp_path / "run", {len(WINDOWS) + 1})
    assert report.verdict == "undetermined"
    assert report.reasons == ["training ended after 8 optimizer steps, none of which was to be recorded"]
    assert "the first is 0" in report.next_step


def test_a_window_that_no_recorded_step_has_is_told_beside_a_clean_verdict(tmp_path: Path) -> None:
    report = judged(tmp_path / "run", {0, 4, 100})
    (note,) = report.coverage.notes
    assert report.verdict == "clean"
    assert "2 steps that were not recorded have 2 backward passes, those judged 3" in note
    assert "--steps 3:4" in note
    assert "--steps 3:4" in report.next_step


def test_a_recorded_window_that_is_short_is_told_by_the_passes_of_the_others(tmp_path: Path) -> None:
    report = judged(tmp_path / "run", {3})
    (found,) = report.findings
    assert (found.code, found.factor.expression) == ("GS303", "2 backward passes of 3")
    assert found.first_event is not None
    assert found.first_event.kind == "loss"
    assert "the window is a short one" in found.explanation
    assert "--steps 0:1" in (found.suggested_experiment or "")


def test_two_steps_in_a_row_are_no_short_windows(tmp_path: Path) -> None:
    """What others do is of another phase, or of another model."""
    with gradcheck_dist.attach(tmp_path / "run", steps={4, 5}):
        train((3, 3, 3, 3, 2, 2))
    (found,) = gradcheck_dist.diagnose(tmp_path / "run").findings
    assert found.factor.observed == pytest.approx(2 / 3)
    assert "window" not in found.explanation


def test_a_short_window_that_divides_by_its_own_passes_is_clean(tmp_path: Path) -> None:
    assert judged(tmp_path / "run", {3}, WINDOWS).verdict == "clean"


def test_losses_that_divide_by_the_passes_of_the_step_before_have_one_cause(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_dist.attach(tmp_path / "run", steps=range(4)):
        for step, (passes, divisor) in enumerate([(1, 1), (2, 1), (3, 2), (4, 3)]):
            for _ in range(passes):
                tokens, labels = torch.randint(0, 16, (2, 5 + 2 * step))
                (F.cross_entropy(model(tokens), labels) / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = gradcheck_dist.diagnose(tmp_path / "run").findings
    assert (found.code, found.steps) == ("GS303", [1, 2, 3])
    assert "as many as the step before had" in found.explanation


def test_another_factor_in_a_short_window_stays_what_it_was(tmp_path: Path) -> None:
    (found,) = judged(tmp_path / "run", {3}, [4] * len(WINDOWS)).findings
    assert found.factor.expression != "2 backward passes of 3"
    assert "window" not in found.explanation


def test_a_line_that_scales_the_gradients_of_a_short_window_keeps_what_was_laid_to_it(tmp_path: Path) -> None:
    (found,) = judged(tmp_path / "run", {3}, WINDOWS, by_hand=True).findings
    assert found.first_event is not None
    assert found.first_event.kind != "loss"
    assert "window" not in found.explanation


def test_what_reduces_in_a_step_that_is_not_recorded_reduces_no_later_pass(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradcheck_dist.attach(tmp_path / "run", steps={0, 2}):
            for _ in range(3):
                for k in range(2):
                    with model.no_sync() if k == 0 else nullcontext():
                        (F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0])) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    events = read_run(tmp_path / "run").ranks[0].events
    passes = [(event.step, event.sync) for event in events if isinstance(event, Backward)]
    assert passes == [(0, False), (0, True), (2, False), (2, True)]


def test_parameters_that_were_put_into_a_known_model_before_the_first_recorded_step_are_watched(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    with gradcheck_dist.attach(tmp_path / "run", steps={2}):
        for step in range(3):
            if step < 2:
                model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 2, 1, 0])).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = gradcheck_dist.diagnose(tmp_path / "run")
    assert (report.verdict, report.reasons) == ("clean", [])
