"""A buffer of the trainer's own that each pass divides before it adds to it (Megatron-LM #3023)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from one_process import judged, record
from probe_workers import batch, token_sum
from torch import nn

PASSES = 3


@pytest.mark.parametrize(
    ("scale", "pattern"), [(1, "x 0.25 0.5 1 by accumulation step"), (2, "x 0.5 1 2 by accumulation step")]
)
def test_what_is_divided_once_more_in_each_pass_is_one_law(scale: int, pattern: str, tmp_path: Path) -> None:
    """Also where losses are multiplied by what one of these divisions was meant for: a pass comes out right."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = [batch(0, k) for k in range(PASSES)]
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        kept = [torch.zeros_like(param) for param in model.parameters()]
        for part in data:
            (token_sum(model, part) / total * scale).backward()
            for buffer, param in zip(kept, model.parameters(), strict=True):
                assert param.grad is not None
                buffer.div_(2).add_(param.grad)
                param.grad = None
        for buffer, param in zip(kept, model.parameters(), strict=True):
            param.grad = buffer
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path / "run", steps=2)
    (finding,) = judged(tmp_path / "run").findings
    assert finding.code == "GS000" and finding.pattern.startswith(pattern)
