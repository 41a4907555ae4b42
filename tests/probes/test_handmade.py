"""What trainers do to gradients on lines of their own: clips, projections and running means are nobody's fault, and the
verdict names the lines; constants are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

Doing = Callable[[nn.Module, int], None]
"""What a trainer does to gradients before the optimizer of a step comes."""
STEPS = 3


def train(folder: Path, doing: Doing, steps: int = STEPS) -> Report:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(folder / "run"):
        for step in range(steps):
            data = [batch(0, 10 * step % 4 + k) for k in range(2)]
            num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
            for tokens, labels in data:
                logits = model(tokens).flatten(0, 1)
                (F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_tokens).backward()
            doing(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(folder / "run"))


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def adaptive_clip(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            over = tuple(range(param.dim() > 1, param.dim()))
            size = param.detach().norm(dim=over, keepdim=True).clamp_min(1e-3)
            param.grad.mul_((0.02 * size / param.grad.norm(dim=over, keepdim=True).clamp_min(1e-6)).clamp_max(1.0))


def clip_each(model: nn.Module, step: int) -> None:
    for grad in gradients(model):
        grad.mul_(min(1.0, 0.137 / float(grad.norm())))


def clip_the_head(model: nn.Module, step: int) -> None:
    grad = gradients(model)[-2]
    grad.mul_(0.137 / float(grad.norm()))


def trust_ratio(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.01 * float(param.detach().norm() / param.grad.norm()))


def drop_layers_in_turn(model: nn.Module, step: int) -> None:
    gradients(model)[step].zero_()


def skip_a_step(model: nn.Module, step: int) -> None:
    if step == 1:
        for grad in gradients(model):
            grad.zero_()


def warm_up(model: nn.Module, step: int) -> None:
    for grad in gradients(model):
        grad.mul_((step + 1) / 10)


def clip_and_normalise(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for grad in gradients(model):
        grad.div_(grad.norm())


def mask(model: nn.Module, step: int) -> None:
    """A mask that leaves the last gradient whole in all steps but one."""
    for index, grad in enumerate(gradients(model)):
        drop = torch.arange(grad.numel()) % 9 == (0 if index < 4 or step == 1 else 99)
        grad.view(-1).mul_(~drop / 0.9)


class RunningMean:
    def __init__(self) -> None:
        self.means: list[Tensor] = []

    def __call__(self, model: nn.Module, step: int) -> None:
        self.means = self.means or [torch.zeros_like(grad) for grad in gradients(model)]
        for mean, grad in zip(self.means, gradients(model), strict=True):
            mean.mul_(0.9).add_(grad, alpha=0.1)
            grad.copy_(mean)


def largest_only(model: nn.Module, step: int) -> None:
    smallest = torch.cat([grad.abs().flatten() for grad in gradients(model)]).topk(20).values[-1]
    for grad in gradients(model):
        grad.mul_(grad.abs() >= smallest)


def signs(model: nn.Module, step: int) -> None:
    for grad in gradients(model):
        grad.sign_()


MEANT: dict[str, Doing] = {
    "adaptive gradient clipping": adaptive_clip,
    "a clip by parameter": clip_each,
    "a clip of one parameter": clip_the_head,
    "trust ratios": trust_ratio,
    "a step that is left out": skip_a_step,
    "a schedule": warm_up,
    "a running mean": RunningMean(),
    "a clip that a normalisation follows": clip_and_normalise,
    "a mask that often leaves a small gradient whole": mask,
    "the largest elements of all": largest_only,
    "signs": signs,
}


@pytest.mark.parametrize("name", MEANT)
def test_what_is_computed_from_gradients_accuses_nobody(tmp_path: Path, name: str) -> None:
    report = train(tmp_path, MEANT[name])
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("test_handmade.py" in reason and "Up to there" in reason for reason in report.reasons), report.reasons
    assert "these lines" in report.next_step


@pytest.mark.parametrize("doing", [adaptive_clip, clip_each, trust_ratio, largest_only])
def test_one_step_is_enough_to_accuse_nobody(tmp_path: Path, doing: Doing) -> None:
    report = train(tmp_path, doing, steps=1)
    assert (report.verdict, report.findings) == ("undetermined", [])


def scale_head(factor: float) -> Doing:
    def doing(model: nn.Module, step: int) -> None:
        for grad in gradients(model)[-2:]:
            grad.mul_(factor)

    return doing


def half_a_head_behind_a_clip(model: nn.Module, step: int) -> None:
    scale_head(0.5)(model, step)
    norm = float(torch.cat([grad.flatten() for grad in gradients(model)]).norm())
    for grad in gradients(model):
        grad.mul_(0.137 / norm)


def by_tokens_again(model: nn.Module, step: int) -> None:
    num_tokens = sum(int((batch(0, 10 * step % 4 + k)[1] >= 0).sum()) for k in range(2))
    for grad in gradients(model):
        grad.div_(num_tokens)


def half_on_biases_beside_noise(model: nn.Module, step: int) -> None:
    for grad in gradients(model):
        grad.mul_(0.5) if grad.dim() < 2 else grad.add_(torch.randn_like(grad))


def half_in_the_last_step(model: nn.Module, step: int) -> None:
    if step == STEPS - 1:
        for grad in gradients(model):
            grad.mul_(0.5)


@pytest.mark.parametrize("doing", [drop_layers_in_turn, scale_head(0.0)])
def test_some_layers_that_are_given_no_gradient_may_be_frozen(tmp_path: Path, doing: Doing) -> None:
    report = train(tmp_path, doing)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("test_handmade.py" in reason and "take it away" in reason for reason in report.reasons), report.reasons


CONSTANTS: dict[str, tuple[Doing, list[int]]] = {
    "a half on the head": (scale_head(0.5), [0, 1, 2]),
    "a number of many digits on the head": (scale_head(0.33714), [0, 1, 2]),
    "a half on the head behind a clip of all": (half_a_head_behind_a_clip, [0, 1, 2]),
    "divided by tokens twice": (by_tokens_again, [0, 1, 2]),
    "a half on biases, where noise is added to the others": (half_on_biases_beside_noise, [0, 1, 2]),
    "a half in the last step": (half_in_the_last_step, [2]),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_is_found(tmp_path: Path, name: str) -> None:
    doing, steps = CONSTANTS[name]
    report = train(tmp_path, doing)
    assert [(finding.code, finding.steps) for finding in report.findings] == [("GS000", steps)]


def test_a_number_of_many_digits_needs_two_steps(tmp_path: Path) -> None:
    assert train(tmp_path / "one", scale_head(0.33714), steps=1).verdict == "undetermined"
    finding = train(tmp_path / "two", scale_head(0.33714), steps=2).findings[0]
    assert finding.factor.observed == pytest.approx(0.33714, rel=1e-4)
    assert "the same in 2 steps" in finding.explanation


def rates(*numbers: float) -> Doing:
    """Rates by layer, the last one's first."""

    def doing(model: nn.Module, step: int) -> None:
        for grad, number in zip(reversed(gradients(model)), numbers, strict=False):
            grad.mul_(number)

    return doing


def rates_before_a_clip(model: nn.Module, step: int) -> None:
    rates(1.0, 0.65, 0.65**2)(model, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def assigned_rates(model: nn.Module, step: int) -> None:
    for param, number in zip(model.parameters(), (0.3, 0.5, 0.7), strict=False):
        assert param.grad is not None
        param.grad = param.grad * number


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "doing",
    [
        rates(1.0, 0.65, 0.65**2),
        rates(0.9, 0.81, 0.5),
        assigned_rates,
        rates_before_a_clip,
    ],
)
def test_rates_that_lines_give_layers_may_be_meant(tmp_path: Path, doing: Doing, steps: int) -> None:
    report = train(tmp_path, doing, steps=steps)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("test_handmade.py" in reason and "Up to there" in reason for reason in report.reasons), report.reasons
    assert steps == 1 or any("rates of their own" in reason for reason in report.reasons), report.reasons


def rates_and_a_division(model: nn.Module, step: int) -> None:
    rates(1.0, 0.65, 0.65**2)(model, step)
    for grad in gradients(model):
        grad.div_(2)


def rates_behind_a_division(model: nn.Module, step: int) -> None:
    for grad in gradients(model):
        grad.div_(2)
    rates(1.0, 0.65, 0.65**2)(model, step)


@pytest.mark.parametrize("doing", [rates_and_a_division, rates_behind_a_division])
def test_rates_hide_no_division_of_all(tmp_path: Path, doing: Doing) -> None:
    assert "GS000" in {finding.code for finding in train(tmp_path, doing).findings}


@pytest.mark.parametrize("doing", [rates(0.5, 0.25, 0.125), rates(1 / 3, 1 / 3)])
def test_numbers_that_divide_some_gradients_once_too_often_are_no_rates(tmp_path: Path, doing: Doing) -> None:
    assert {finding.code for finding in train(tmp_path, doing).findings} == {"GS000"}


@pytest.mark.parametrize("constant", [False, True])
def test_gradients_that_were_kept_while_buffers_were_emptied_are_not_lost(tmp_path: Path, constant: bool) -> None:
    """Projection between tasks: each gradient is taken on its own, and what comes of them is put back."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            data = [batch(0, 10 * step % 4 + k) for k in range(2)]
            num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
            kept: list[list[Tensor]] = []
            for tokens, labels in data:
                optimizer.zero_grad()
                logits = model(tokens).flatten(0, 1)
                (F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_tokens).backward()
                kept.append([grad.clone() for grad in gradients(model)])
            one, other = (torch.cat([grad.flatten() for grad in grads]) for grads in kept)
            shares = (0.5, 1.0) if constant else (1 + float(one @ other / (one @ one)), 1.0)
            for param, first, second in zip(model.parameters(), *kept, strict=True):
                param.grad = shares[0] * first + shares[1] * second
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == (["GS000"] if constant else [])
    if not constant:
        assert report.verdict == "undetermined"


@pytest.mark.parametrize(
    ("acts", "equal", "found"),
    [("in one step", False, []), ("in one step", True, []), ("never", False, ["GS301"]), ("never", True, ["GS303"])],
)
def test_tasks_that_are_projected_in_one_step_may_be_added_up_in_the_others(
    tmp_path: Path, acts: str, equal: bool, found: list[str]
) -> None:
    """Each is a mean over its own tokens: what looks like a division that is missing may be gradient surgery."""
    model = Net()
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(tmp_path / "run"):
        for step in range(2):
            kept: list[Tensor] = []
            for tokens, labels in [batch(0, 2 * step + k) for k in range(2)]:
                for param in model.parameters():
                    param.grad = None
                if equal:  # of nearly orthogonal tasks both are left with nearly the same
                    tokens, labels = torch.randint(20, (2, 4, 6))
                F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
                kept.append(torch.cat([grad.flatten() for grad in gradients(model)]))
            one, other = kept
            dot = float(one @ other) if step and acts != "never" else 0.0
            both = one - dot / float(other @ other) * other + other - dot / float(one @ one) * one
            parts = both.split([param.numel() for param in model.parameters()])
            for param, part in zip(model.parameters(), parts, strict=True):
                param.grad = part.view_as(param)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == found
    told = [*report.reasons, *(finding.explanation for finding in report.findings)]
    assert any("kept apart" in words and "tasks of their own" in words for words in told)
