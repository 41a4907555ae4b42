"""A parameter that a group of an optimizer has twice (GS709)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run

Params = Sequence[Tensor]


class OnceEach(Optimizer):
    """One that steps each parameter once, however often it is listed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in {param for group in self.param_groups for param in group["params"]}:
            param.sub_(0.1 * param.grad)


def trained(run: Path | None, make: Callable[[Params, Params], Optimizer]) -> tuple[Report | None, float]:
    """Two heads over one trunk; the report, and what the trunk's weight adds up to."""
    torch.manual_seed(0)
    trunk = nn.Linear(6, 8)
    actor, critic = (nn.Sequential(trunk, nn.Tanh(), nn.Linear(8, size)) for size in (4, 1))
    optimizer = make(list(actor.parameters()), list(critic.parameters()))

    def step() -> None:
        for _ in range(2):
            given = torch.randn(8, 6)
            loss = F.cross_entropy(actor(given), torch.arange(8) % 4) + critic(given).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    if run is None:
        step()
        return None, trunk.weight.sum().item()
    with gradcheck_dist.attach(run):
        step()
    return diagnose(read_run(run)), trunk.weight.sum().item()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_what_two_lists_share_is_found(kind: type[Optimizer], tmp_path: Path) -> None:
    def both(actor: Params, critic: Params) -> Optimizer:
        return kind([*actor, *critic], lr=0.1)  # type: ignore[call-arg]

    report, weight = trained(tmp_path / "run", both)
    assert report is not None and report.verdict == "findings"
    (finding,) = report.findings
    assert (finding.code, finding.num_parameters) == ("GS709", 2)
    assert finding.first_event is not None and finding.first_event.kind == "optimizer_step"
    assert math.isclose(weight, trained(None, both)[1], rel_tol=0)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(
    "make",
    [
        lambda actor, critic: torch.optim.SGD([*dict.fromkeys([*actor, *critic])], lr=0.1),
        lambda actor, critic: torch.optim.SGD([{"params": actor}, {"params": critic[2:], "lr": 0.01}], lr=0.1),
        lambda actor, critic: OnceEach([*actor, *critic]),
    ],
    ids=["each once", "groups", "an optimizer that steps each once"],
)
def test_who_steps_each_once_is_not_accused(make: Callable[[Params, Params], Optimizer], tmp_path: Path) -> None:
    report, _ = trained(tmp_path / "run", make)
    assert report is not None
    assert not [finding.code for finding in report.findings]
