"""Losses that several passes of a step differentiate: found where all of their gradients are kept, and only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run

STEPS, SIZES = 4, (7, 3, 5)
Passes = Callable[[nn.Sequential, list[Tensor]], None]
"""The backward passes of one step, given the loss of each microbatch over the tokens of the step."""


def running_total(_: nn.Sequential, losses: list[Tensor]) -> None:
    for count in range(1, len(losses) + 1):
        torch.stack(losses[:count]).sum().backward(retain_graph=True)


def twice(_: nn.Sequential, losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()


def in_halves(_: nn.Sequential, losses: list[Tensor]) -> None:
    for loss in losses:
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()


def a_quarter_and_the_rest(_: nn.Sequential, losses: list[Tensor]) -> None:
    for loss in losses:
        (loss * 0.25).backward(retain_graph=True)
        (loss * 0.75).backward()


def three_halves(_: nn.Sequential, losses: list[Tensor]) -> None:
    for loss in losses:
        for _ in range(3):
            (loss / 2).backward(retain_graph=True)


def last_twice(_: nn.Sequential, losses: list[Tensor]) -> None:
    losses[-1].backward(retain_graph=True)
    for loss in losses:
        loss.backward()


def scaled_but_once(_: nn.Sequential, losses: list[Tensor]) -> None:
    for index, loss in enumerate(losses):
        (4 * loss).backward(retain_graph=index == 1)
        if index == 1:
            loss.backward()


def once(_: nn.Sequential, losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()


def layer_by_layer(model: nn.Sequential, losses: list[Tensor]) -> None:
    for loss in losses:
        for layer in (model[0], model[2]):
            loss.backward(inputs=list(layer.parameters()), retain_graph=True)


def looked_at_first(model: nn.Sequential, losses: list[Tensor]) -> None:
    for loss in losses:
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()


def emptied_between(model: nn.Sequential, losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward(retain_graph=True)
    model.zero_grad()
    for loss in losses:
        loss.backward()


def emptied_by_hand(model: nn.Sequential, losses: list[Tensor]) -> None:
    """What nobody records."""
    for last in (False, True):
        for param in model.parameters():
            param.grad = None
        for loss in losses:
            loss.backward(retain_graph=not last)


def handed_over_twice(model: nn.Sequential, losses: list[Tensor]) -> None:
    """Once to look at them, once to put them in place."""
    for loss in losses:
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for param, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            param.grad = grad if param.grad is None else param.grad + grad


def train(
    folder: Path,
    passes: Passes,
    *,
    divisor: int | None = None,
    mean: bool = False,
    sampled: int = 2,
    without_gradient: bool = False,
) -> Report:
    """`without_gradient`: the first layer's output is multiplied by zero, so its gradients are zeros in every pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run", steps=range(sampled), every_step=True, objective="global-token-mean"):
        for _ in range(STEPS):
            losses = []
            for size in SIZES:
                first = model[0](torch.randn(size, 8))
                output = model[2](torch.randn(size, 16) + 0 * first) if without_gradient else model[1:](first)
                labels = torch.randint(0, 5, (size,))
                of_sum = F.cross_entropy(output, labels, reduction="sum") / (divisor or sum(SIZES))
                losses.append(F.cross_entropy(output, labels) / len(SIZES) if mean else of_sum)
            passes(model, losses)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(folder / "run")


@pytest.mark.parametrize(
    "passes",
    [
        once,
        layer_by_layer,
        looked_at_first,
        emptied_between,
        emptied_by_hand,
        handed_over_twice,
        in_halves,
        a_quarter_and_the_rest,
    ],
)
def test_a_loss_whose_tokens_enter_once_is_right(tmp_path: Path, passes: Passes) -> None:
    report = train(tmp_path, passes, sampled=STEPS)
    assert (report.verdict, report.reasons) == ("clean", [])


def test_parts_of_a_loss_that_are_more_than_the_loss_are_found(tmp_path: Path) -> None:
    assert "GS403" in {finding.code for finding in train(tmp_path, three_halves).findings}


@pytest.mark.parametrize("passes", [emptied_by_hand, handed_over_twice])
def test_gradients_that_are_zero_show_no_repetition(tmp_path: Path, passes: Passes) -> None:
    assert train(tmp_path, passes, sampled=STEPS, without_gradient=True).findings == []


@pytest.mark.parametrize(
    ("passes", "factor", "pattern"),
    [
        (running_total, None, "tokens weigh x 3 2 1 by accumulation step"),
        (twice, 2.0, "every loss goes backward 2 times"),
        (last_twice, None, "tokens weigh x 2 1 1 by accumulation step"),
    ],
)
def test_a_loss_that_goes_backward_again_is_found_at_the_pass(
    tmp_path: Path, passes: Passes, factor: float | None, pattern: str
) -> None:
    (finding,) = train(tmp_path, passes).findings
    assert (finding.code, finding.factor.observed, finding.steps) == ("GS403", factor, [0, 1])
    assert pattern in finding.pattern
    assert finding.first_event is not None and finding.first_event.kind == "backward"
    assert (finding.first_event.function, finding.num_parameters) == (passes.__name__, 4)


def scaled_and_unscaled(passes: Passes) -> Passes:
    def scaled(model: nn.Sequential, losses: list[Tensor]) -> None:
        passes(model, [loss * 1024 for loss in losses])
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(1 / 1024)

    return scaled


@pytest.mark.parametrize(
    ("passes", "pattern"),
    [(twice, "every loss goes backward 2 times"), (last_twice, "tokens weigh x 2 1 1 by accumulation step")],
)
def test_a_loss_scale_by_hand_hides_no_repetition(tmp_path: Path, passes: Passes, pattern: str) -> None:
    (finding,) = train(tmp_path, scaled_and_unscaled(passes)).findings
    assert (finding.code, finding.pattern.partition(",")[0]) == ("GS403", pattern)


def averaged(passes: Passes) -> Passes:
    """As lines behind a sum over two ranks divide."""

    def halved(model: nn.Sequential, losses: list[Tensor]) -> None:
        passes(model, [loss * 2 for loss in losses])
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(2)

    return halved


def test_what_lines_by_hand_divide_by_hides_no_repetition(tmp_path: Path) -> None:
    (finding,) = train(tmp_path, averaged(twice)).findings
    assert (finding.code, finding.pattern) == ("GS403", "every loss goes backward 2 times")


def test_one_loss_of_whose_repetition_a_half_may_be_gone_is_told_as_one(tmp_path: Path) -> None:
    """What one of torch's functions divides by is not seen: half of two gradients is as much as one of them."""

    def replaced(model: nn.Sequential, losses: list[Tensor]) -> None:
        twice(model, [loss * 2 for loss in losses])
        for param in model.parameters():
            assert param.grad is not None
            param.grad = torch.div(param.grad, 2)

    report = train(tmp_path, replaced)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(reason.startswith("each loss goes backward at ") for reason in report.reasons), report.reasons


@pytest.mark.parametrize("passes", [once, emptied_by_hand, handed_over_twice])
def test_what_lines_by_hand_divide_by_makes_no_repetition(tmp_path: Path, passes: Passes) -> None:
    assert train(tmp_path, averaged(passes), sampled=STEPS).findings == []


@pytest.mark.parametrize("passes", [once, handed_over_twice])
def test_a_loss_scale_by_hand_makes_no_repetition(tmp_path: Path, passes: Passes) -> None:
    assert train(tmp_path, scaled_and_unscaled(passes), sampled=STEPS).findings == []


def test_a_clip_by_hand_behind_a_repetition_is_nobody_s_fault(tmp_path: Path) -> None:
    def clipped(model: nn.Sequential, losses: list[Tensor]) -> None:
        last_twice(model, losses)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        total = float(torch.cat([grad.flatten() for grad in grads]).norm())
        for grad in grads:
            grad.mul_(0.05 / (total + 1e-6))

    (finding,) = train(tmp_path, clipped).findings
    assert finding.code == "GS403"


UNSEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda output, labels: F.mse_loss(output, F.one_hot(labels, 5).float()),
    "squares by hand": lambda output, labels: ((output - F.one_hot(labels, 5)) ** 2).mean(),
    "logsumexp": lambda output, labels: (output.logsumexp(1) - output.gather(1, labels[:, None])[:, 0]).sum() / 15,
    "one hot": lambda output, labels: -(F.one_hot(labels, 5) * output.log_softmax(1)).sum() / 15,
    "masked targets": lambda output, labels: (
        -((labels > 0)[:, None] * F.one_hot(labels, 5) * output.log_softmax(1)).sum()
    ),
}


@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("loss", UNSEEN)
def test_a_loss_that_is_found_in_the_graph_is_the_same_one_when_it_goes_backward_again(
    tmp_path: Path, loss: str, repeated: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(2):
            for index, size in enumerate(SIZES):
                value = UNSEEN[loss](model(torch.randn(size, 8)), torch.randint(0, 5, (size,)))
                if repeated and index == 0:
                    value.backward(retain_graph=True)
                value.backward()
            optimizer.step()
            optimizer.zero_grad()
    again = [one.pattern for one in diagnose_run(tmp_path / "run").findings if one.code == "GS403"]
    assert [one.partition(",")[0] for one in again] == ["tokens weigh x 2 1 1 by accumulation step"] * repeated


@pytest.mark.parametrize(
    "passes", [once, layer_by_layer, looked_at_first, emptied_between, emptied_by_hand, handed_over_twice]
)
def test_a_loss_that_counts_nothing_and_enters_once_repeats_none(tmp_path: Path, passes: Passes) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(2):
            losses = [F.mse_loss(model(torch.randn(size, 8)), torch.randn(size, 5)) / len(SIZES) for size in SIZES]
            passes(model, losses)
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose_run(tmp_path / "run").findings == []


ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda output, labels: F.mse_loss(output, F.one_hot(labels, 5).float(), reduction="none").mean(1),
    "soft targets": lambda output, labels: -(output.detach().roll(1, 1).softmax(1) * output.log_softmax(1)).sum(1),
    "picked": lambda output, labels: -output.log_softmax(1)[torch.arange(len(labels)), labels],
    "logsumexp": lambda output, labels: output.logsumexp(1) - output.gather(1, labels[:, None])[:, 0],
}


@pytest.mark.parametrize("loss", ROWS)
def test_losses_that_are_parts_of_one_tensor_are_others(tmp_path: Path, loss: str) -> None:
    """Iterating over it makes one node of the graph, of which each is an output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(2):
            for row in ROWS[loss](model(torch.randn(3, 8)), torch.randint(0, 5, (3,))) / 3:
                row.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    assert diagnose_run(tmp_path / "run").findings == []


def test_other_targets_of_the_same_log_probabilities_make_another_loss(tmp_path: Path) -> None:
    """Two teachers, one after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(2):
            for _ in SIZES:
                log_probs = model(torch.randn(7, 8)).log_softmax(1)
                for _ in range(2):
                    (-(torch.randn(7, 5).softmax(1) * log_probs).sum() / 21).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    assert [one.code for one in diagnose_run(tmp_path / "run").findings if one.code == "GS403"] == []


def test_losses_that_are_means_are_weighed_apart_in_a_running_total_and_it_is_found(tmp_path: Path) -> None:
    (finding,) = train(tmp_path, running_total, mean=True).findings
    assert finding.code == "GS403"


def test_a_wrong_loss_is_told_besides_by_what_it_divides(tmp_path: Path) -> None:
    """By tokens that enter once: neither fault is told as a product of both."""
    wrong, again = sorted(train(tmp_path, running_total, divisor=sum(SIZES) * 2).findings, key=lambda one: one.code)
    assert (wrong.code, wrong.factor.exact, again.code) == ("GS303", "1/2", "GS403")


@pytest.mark.parametrize(("passes", "factor"), [(twice, 2.0), (last_twice, None)])
def test_a_mean_of_means_that_goes_backward_again_is_told_as_such_besides(
    tmp_path: Path, passes: Passes, factor: float | None
) -> None:
    """A pass that brings no tokens has no count."""
    wrong, again = sorted(train(tmp_path, passes, mean=True).findings, key=lambda one: one.code)
    assert (wrong.code, again.code, again.factor.observed) == ("GS301", "GS403", factor)


def test_passes_again_are_no_accumulation_steps_that_a_factor_could_be_made_of(tmp_path: Path) -> None:
    def first_twice(_: nn.Sequential, losses: list[Tensor]) -> None:
        for index, loss in enumerate(losses):
            (len(losses) * loss).backward(retain_graph=index == 0)
            if index == 0:
                (len(losses) * loss).backward()

    report = train(tmp_path, first_twice)
    assert sorted(finding.code for finding in report.findings) == ["GS303", "GS403"]
    undivided = next(finding for finding in report.findings if finding.code == "GS303")
    assert undivided.factor.expression == "accumulation_steps"


def test_passes_again_bring_no_tokens_that_a_line_behind_should_divide_by(tmp_path: Path) -> None:
    def first_twice_and_divided(model: nn.Sequential, losses: list[Tensor]) -> None:
        for index, loss in enumerate(losses):
            loss.backward(retain_graph=index == 0)
            if index == 0:
                loss.backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.div_(20)

    found = {finding.code: finding for finding in train(tmp_path, first_twice_and_divided, divisor=1).findings}
    assert sorted(found) == ["GS000", "GS403"]
    assert f"{1 / sum(SIZES):.6g} = 1/num_tokens" in found["GS000"].fix


def test_a_loss_of_several_terms_that_goes_backward_again_counts_once(tmp_path: Path) -> None:
    """One that counts has a coefficient there, beside one that counts nothing."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run", steps=range(2), objective="microbatch-mean"):
        for _ in range(2):
            for again in (True, False):
                output = model(torch.randn(5, 8))
                distance = F.mse_loss(output[:, :3], torch.randn(5, 3))
                counted = F.cross_entropy(output[:, 3:], torch.randint(0, 5, (5,)))
                loss = (distance + 0.3 * counted) / 2
                if again:
                    loss.backward(retain_graph=True)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose_run(tmp_path / "run").findings
    assert finding.code == "GS403"


def test_what_goes_backward_again_and_is_emptied_counts_once(tmp_path: Path) -> None:
    def first_twice_and_emptied(model: nn.Sequential, losses: list[Tensor]) -> None:
        for index, loss in enumerate(losses):
            model.zero_grad()
            if index == 0:
                loss.backward(retain_graph=True)
            loss.backward()

    (finding,) = train(tmp_path, first_twice_and_emptied).findings
    assert finding.code == "GS401"


def test_a_loss_that_weighs_another_number_when_it_goes_backward_again_is_judged(tmp_path: Path) -> None:
    wrong, again = sorted(train(tmp_path, scaled_but_once).findings, key=lambda one: one.code)
    assert (wrong.code, again.code) == ("GS000", "GS403")
    assert wrong.factor.observed == pytest.approx(4.0)


def test_what_steps_without_samples_document_is_left_alone(tmp_path: Path) -> None:
    (finding,) = train(tmp_path, twice, sampled=1).findings
    assert (finding.code, finding.steps) == ("GS403", [0])


@pytest.mark.parametrize(
    ("divisor", "picked", "code"),
    [(8, range(8), None), (1, range(8), "GS303"), (8, [*range(8), 0], "GS403")],
)
def test_a_gradient_for_each_sample_of_one_loss_repeats_none(
    tmp_path: Path, divisor: int, picked: Sequence[int], code: str | None
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)
    with attach(tmp_path / "run"):
        for _ in range(2):
            losses = F.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 5, (8,)), reduction="none")
            for sample in picked:
                (losses[sample] / divisor).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose_run(tmp_path / "run")
    assert [finding.code for finding in report.findings] == ([] if code is None else [code])
    assert code is not None or report.verdict == "clean"


def test_a_gradient_for_each_sample_of_which_the_last_replaces_the_others_is_found(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    params = list(model.parameters())
    torch.manual_seed(0)
    with attach(tmp_path / "run"):
        for _ in range(2):
            losses = F.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 5, (8,)), reduction="none")
            for loss in losses:
                for param, grad in zip(params, torch.autograd.grad(loss / 8, params, retain_graph=True), strict=True):
                    param.grad = grad
            optimizer.step()
            optimizer.zero_grad()
    assert [finding.code for finding in diagnose_run(tmp_path / "run").findings] == ["GS401"]
