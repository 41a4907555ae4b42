"""Complex parameters (neural operators, state spaces): the real part of a gradient tells its weights."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

PASSES, WORDS, WIDTH = 2, 20, 8


class Filtered(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.filter = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).transpose(1, 2)
        modes = torch.einsum("bix,iox->box", torch.fft.rfft(hidden)[..., :3].to(self.filter.dtype), self.filter)
        filtered = torch.fft.irfft(modes, n=tokens.shape[1]).to(hidden.dtype)
        return self.head((hidden + filtered).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("verify", [False, True], ids=["recorded", "verified"])
@pytest.mark.parametrize(("divided", "found"), [(1, []), (PASSES, ["GS303"])])
def test_a_complex_parameter_is_judged_like_the_others(
    dtype: torch.dtype, divided: int, found: list[str], verify: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Filtered(dtype)
    optimizer = torch.optim.Adam(model.parameters())
    with warnings.catch_warnings(action="error"), attach(tmp_path / "run", verify=verify):
        for _ in range(3):
            batches = [torch.randint(WORDS, (2, 2, 9 + 4 * k)) for k in range(PASSES)]
            num_tokens = sum(labels.numel() for _, labels in batches)
            for tokens, labels in batches:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
                (loss / num_tokens / divided).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == found, report.reasons
    coverage = report.coverage
    assert (coverage.parameters_observed, coverage.parameters_total, coverage.problems) == (4, 4, [])
