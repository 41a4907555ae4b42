"""Models that are scripted, traced or exported while probes are in place: these are as if nothing watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.probes import attach

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(features)
        scaled = scores.detach().clone()
        scaled.mul_(2.0)
        scaled.div_(2.0)
        picked = torch.gather(scores.log_softmax(-1), 1, labels[:, None])
        return F.cross_entropy(scores, labels) + 0.0 * (scaled.sum() + picked.sum() + torch.linalg.vector_norm(scores))


@pytest.mark.parametrize(
    "made",
    [
        lambda model, given: torch.jit.script(model),
        lambda model, given: torch.jit.trace(model, given),
        lambda model, given: torch.export.export(model, given).module(),
    ],
    ids=["script", "trace", "export"],
)
def test_a_model_is_made_as_without_probes(tmp_path: Path, made: Callable[[nn.Module, Any], Any]) -> None:
    torch.manual_seed(0)
    model, given = Scored(), (torch.randn(3, 4), torch.tensor([1, 2, 3]))
    with attach(tmp_path / "run"):
        inside = made(model, given)
    outside = made(model, given)
    assert inside(*given).item() == outside(*given).item() == model(*given).item()
    if isinstance(outside, torch.jit.ScriptModule):  # nothing of a probe is in it
        assert len(list(inside.graph.nodes())) == len(list(outside.graph.nodes()))
