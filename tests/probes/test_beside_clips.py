"""Faults beside what a trainer's own lines do to every gradient at the end of a step: clips of each parameter, loss
scales by hand. One fault is one finding, with the number that it has without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run

STEPS, SIZES, SCALE = 3, (7, 3, 5, 4), 1024.0


def adaptive_clip(model: nn.Module, floor: float) -> None:
    for param in model.parameters():
        assert param.grad is not None
        most = 0.02 * max(float(param.detach().norm()), floor) / float(param.grad.norm())
        if most < 1:
            param.grad.mul_(most)


def train(
    folder: Path,
    *,
    factors: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0),
    scale: float = 1.0,
    behind: bool = False,
    clips: bool = True,
    floor: float = 1e-3,
    zero_bias: bool = False,
) -> Report:
    """Losses are sums times `factors` over all tokens, which they are divided by, or gradients `behind` all passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    if zero_bias:
        nn.init.zeros_(model[2].bias)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run"):
        for _ in range(STEPS):
            for size, factor in zip(SIZES, factors, strict=True):
                loss = F.cross_entropy(model(torch.randn(size, 8)), torch.randint(0, 5, (size,)), reduction="sum")
                (loss * factor * scale / (1 if behind else sum(SIZES))).backward()
            for divisor in (sum(SIZES) if behind else 1, scale):
                for param in model.parameters() if divisor != 1 else ():
                    assert param.grad is not None
                    param.grad.mul_(1 / divisor)
            if clips:
                adaptive_clip(model, floor)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(folder / "run")


@pytest.mark.parametrize("zero_bias", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_a_right_trainer_that_clips_each_parameter_is_not_accused(
    tmp_path: Path, scale: float, behind: bool, zero_bias: bool
) -> None:
    """A bias that begins at zero stays there where its gradient may be no larger than a share of it."""
    report = train(tmp_path, scale=scale, behind=behind, floor=0.0 if zero_bias else 1e-3, zero_bias=zero_bias)
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize(
    ("factors", "pattern"),
    [
        ((1.0, 1.0, 1.0, 2.0), "x 2 on the last accumulation step (3), the rest right"),
        ((1.0, 1.0, 3.0, 3.0), "x 3 on accumulation steps 2, 3, the rest right"),
        ((0.5, 0.5, 0.5, 0.5), "every contribution x 0.5"),
    ],
)
def test_a_fault_before_clips_of_parameters_has_its_own_number(
    tmp_path: Path, factors: tuple[float, ...], pattern: str, scale: float
) -> None:
    (finding,) = train(tmp_path, factors=factors, scale=scale).findings
    assert (finding.pattern, finding.num_parameters) == (pattern, 4)
    assert finding.first_event is not None and finding.first_event.kind == "loss"


def test_a_loss_scale_that_was_taken_out_is_no_part_of_a_fault(tmp_path: Path) -> None:
    (finding,) = train(tmp_path, factors=(3.0, 3.0, 3.0, 3.0), scale=SCALE, clips=False).findings
    assert (finding.pattern, finding.first_event and finding.first_event.kind) == ("every contribution x 3", "loss")


def test_a_buffer_that_each_pass_empties_is_told_alike_in_every_step(tmp_path: Path) -> None:
    """Whether a pass's own hook, or a line behind it, is seen to leave nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = {param: torch.zeros_like(param) for param in model.parameters()}

    def arrived(param: torch.Tensor) -> None:
        assert param.grad is not None
        kept[param].add_(param.grad)  # type: ignore[index]
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(arrived)
    with attach(tmp_path / "run"):
        for _ in range(STEPS):
            for size in SIZES:
                for buffer in kept.values():
                    buffer.zero_()
                loss = F.cross_entropy(model(torch.randn(size, 8)), torch.randint(0, 5, (size,)), reduction="sum")
                (loss / sum(SIZES)).backward()
            for param, buffer in kept.items():
                param.grad = buffer
            optimizer.step()
    (finding,) = diagnose_run(tmp_path / "run").findings
    assert (finding.code, finding.steps) == ("GS401", [0, 1, 2])
