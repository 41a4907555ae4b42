"""A hand-written update of DTensors whose gradients are zeroed by hand is judged as that of plain tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

ACCUMULATION, WORDS = 3, 11


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("divisor", "found"), [(1, []), (ACCUMULATION, ["1/accumulation_steps"])])
def test_what_was_read_is_known(tmp_path: Path, divisor: int, found: list[str]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, WORDS))
    parallelize_module(net, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with attach(tmp_path, steps=range(3)):
        for _ in range(4):
            for num in range(1, ACCUMULATION + 1):
                loss = F.cross_entropy(net(torch.randn(num, 6)), torch.randint(0, WORDS, (num,)), reduction="sum")
                (loss / 6 / divisor).backward()
            with torch.no_grad():
                for param in net.parameters():
                    assert param.grad is not None
                    param.sub_(param.grad, alpha=0.1)
                    param.grad.zero_()
    report = diagnose(read_run(tmp_path))
    assert [finding.factor.expression for finding in report.findings] == found
    assert report.verdict == ("findings" if found else "clean"), report.reasons
