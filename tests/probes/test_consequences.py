"""What a finding says of this run, against the numbers computed from the gradients themselves."""

from __future__ import annotations

from collections.abc import Callable
from math import acos, degrees
from pathlib import Path

import pytest
import torch
from probe_workers import Net, batch, token_sum
from torch import Tensor

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.norms.consequence import consequence
from gradcheck_dist.diagnosis.norms.effect import Effect
from gradcheck_dist.events import OptimizerStep
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

NUM = 3
Loss = Callable[[Net, int], Tensor]
Make = Callable[[Net], torch.optim.Optimizer]


def data(k: int) -> tuple[Tensor, Tensor]:
    return batch(0, k)


def tokens(k: int) -> int:
    return int((data(k)[1] >= 0).sum())


TOTAL = sum(tokens(k) for k in range(NUM))


def right(model: Net, k: int) -> Tensor:
    return token_sum(model, data(k)) / TOTAL


def third(model: Net, k: int) -> Tensor:
    return right(model, k) / 3


def means(model: Net, k: int) -> Tensor:
    return token_sum(model, data(k)) / tokens(k) / NUM


def gradient(loss: Loss) -> Tensor:
    model = Net()
    for k in range(NUM):
        loss(model, k).backward()
    return torch.cat([param.grad.flatten().double() for param in model.parameters() if param.grad is not None])


def found(run_dir: Path, loss: Loss, make: Make, *, max_norm: float | None = None, steps: int = 1) -> Finding:
    model = Net()
    optimizer = make(model)
    with attach(run_dir, objective="global-token-mean", sample_size=1000):
        for _ in range(steps):
            for k in range(NUM):
                loss(model, k).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(run_dir)).findings
    return finding


def sgd(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=0.1)


def adamw(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.001, eps=1e-3)


def test_sgd_takes_a_factor_for_another_learning_rate(tmp_path: Path) -> None:
    text = found(tmp_path, third, sgd).consequence
    assert "Gradient: norm x 0.3333 of the right one's, direction right." in text
    assert "as if the learning rate were 0.1, not 0.3" in text
    assert "Weight decay is added to the gradient: against it, it counts x 3." in text
    assert "Clipping: no clip by norm was recorded." in text.splitlines()


def test_adamw_leaves_of_a_factor_what_epsilon_leaves(tmp_path: Path) -> None:
    text = found(tmp_path, third, adamw).consequence
    model = Net()
    for k in range(NUM):
        right(model, k).backward()
    sizes = [float(param.grad.norm()) / param.numel() ** 0.5 for param in model.parameters() if param.grad is not None]
    changes = sorted(abs((size / 3) / (size / 3 + 1e-3) * (size + 1e-3) / size - 1) for size in sizes)
    assert "divides away a factor that is the same in every step" in text
    assert f"an update differ by {100 * changes[-1]:.2g} % at most, median {100 * changes[2]:.2g} %" in text
    assert "Weight decay is decoupled and stays the same." in text


def test_weights_that_differ_turn_the_gradient(tmp_path: Path) -> None:
    text = found(tmp_path, means, adamw).consequence
    good, bad = gradient(right), gradient(means)
    angle = degrees(acos(float(good @ bad / good.norm() / bad.norm())))
    assert f"norm x {float(bad.norm() / good.norm()):.4g} of the right one's" in text
    assert f"direction {angle:.2g} degrees away" in text
    ratios = sorted(TOTAL / (NUM * tokens(k)) for k in range(NUM))
    assert f"from x {ratios[0]:.4g} to x {ratios[-1]:.4g} of what they should, median x {ratios[1]:.4g}" in text
    assert "hides a factor that a whole parameter shares, but not this one" in text


@pytest.mark.parametrize(
    ("max_norm", "said"),
    [
        (1e-3, "Clipping: to 0.001, with the fault and without (norm {now}, about {then} without the fault): after it "
         "the factor is gone."),
        (0.3, "Clipping: none, where it should be to 0.3"),
        (100.0, "Clipping: none, with the fault or without: below max_norm 100"),
    ],
)  # fmt: skip
def test_the_clip_is_told_with_and_without_the_fault(max_norm: float, said: str, tmp_path: Path) -> None:
    norms = {"now": f"{float(gradient(third).norm()):.4g}", "then": f"{float(gradient(right).norm()):.4g}"}
    assert said.format(**norms) in found(tmp_path, third, sgd, max_norm=max_norm).consequence


def test_steps_that_are_clipped_are_counted(tmp_path: Path) -> None:
    finding = found(tmp_path, third, adamw, max_norm=0.3, steps=3)
    assert finding.steps == [0, 1, 2]
    assert "0 of 3 recorded steps are clipped; without the fault 3 would be." in finding.consequence


def test_a_factor_that_is_gone_behind_the_clip_leaves_sgd_as_it_was(tmp_path: Path) -> None:
    assert "SGD's step keeps its length" in found(tmp_path, third, sgd, max_norm=1e-3).consequence


def test_an_optimizer_that_nobody_knows_is_not_judged(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        pass

    text = found(tmp_path, third, lambda model: Mine(model.parameters(), lr=0.1)).consequence
    assert "Optimizer: what Mine makes of a factor is not known here." in text


def test_a_clip_without_effect_lengthens_the_step(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with attach(tmp_path, objective="global-token-mean"):
        for k in range(NUM):
            right(model, k).backward()
        torch.nn.utils.clip_grads_with_norm_([], 0.1, torch.nn.utils.get_total_norm(
            [param.grad for param in model.parameters() if param.grad is not None]))  # fmt: skip
        optimizer.step()
    (finding,) = diagnose(read_run(tmp_path)).findings
    factor = (float(gradient(right).norm()) + 1e-6) / 0.1
    assert f"right up to the clip and x {factor:.4g} of what they should be after it" in finding.consequence
    assert f"as if the learning rate were {0.3 * factor:.4g}, not 0.3" in finding.consequence


@pytest.mark.parametrize(("rest", "told"), [((1.0, 1.0), "the same in every step"), ((1.0, 0.8), "from x 0.4 to x 1")])
def test_adam_divides_by_each_parameters_own_size_not_by_the_norm_of_all(rest: tuple[float, float], told: str) -> None:
    step = OptimizerStep(seq=1, t_ns=0, step=0, optimizer="AdamW", params=0, lr=0.1)
    effects = [
        Effect(scale=scale, angle=7.0, param_scales=(0.5, 1.0), coefficient=left, optimizer=step)
        for scale, left in zip((0.96, 0.99), rest, strict=True)
    ]
    assert told in consequence(effects)
