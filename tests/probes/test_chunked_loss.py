"""A loss in chunks: the head's passes count tokens, and the body gets what they leave at the hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

NUM_CHUNKS, TOKENS = 4, 24


class HandOn(torch.autograd.Function):
    """A loss of which backward gives a gradient that was computed before."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def trained(run_dir: Path, *, body_divided_by: int = 1, head_divided_by: int = 1, by_function: bool = False) -> Report:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 10)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    with attach(run_dir):
        for _ in range(2):
            optimizer.zero_grad()
            hidden, labels = body(torch.randn(TOKENS, 6)), torch.randint(10, (TOKENS,))
            cut = hidden.detach().requires_grad_()
            for states, chunk in zip(cut.chunk(NUM_CHUNKS), labels.chunk(NUM_CHUNKS), strict=True):
                (F.cross_entropy(head(states), chunk, reduction="sum") / (TOKENS * head_divided_by)).backward()
            assert cut.grad is not None
            gradient = cut.grad / body_divided_by
            (HandOn.apply(hidden, gradient) / 1).backward() if by_function else hidden.backward(gradient)
            optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("body_divided_by", [1, NUM_CHUNKS])
def test_what_only_passes_without_a_loss_train_is_not_called_right(
    tmp_path: Path, body_divided_by: int, by_function: bool
) -> None:
    report = trained(tmp_path, body_divided_by=body_divided_by, by_function=by_function)
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = report.reasons
    assert "2 parameter(s) (0.bias, 0.weight) get gradients only from backward passes that no loss begins" in reason
    assert "in one pass" in report.next_step


def test_what_is_wrong_at_the_losses_that_count_is_found_all_the_same(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, head_divided_by=NUM_CHUNKS).findings
    assert finding.code == "GS303"
