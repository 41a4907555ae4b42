"""Samples that are taken on a side stream of a device (FSDP2 reduces on one) come to the host when they are there, and
their memory is not used again before. Needs a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_dist.events import AFTER
from gradcheck_dist.probes.parameters.plans import LocalPlan
from gradcheck_dist.probes.parameters.registry import Registry
from gradcheck_dist.probes.recording.samples import Sampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LONG = 200_000_000
"""Cycles that a stream is kept busy, a tenth of a second: what does not wait for it is seen."""
NUM = 8


def kept_on(stream: torch.cuda.Stream, sampler: Sampler, *, busy: bool) -> None:
    """A row of sevens, computed on a stream in memory that held other numbers before."""
    device = stream.device
    plan = LocalPlan(0, 0, range(NUM), device)
    with torch.cuda.stream(stream):
        before = torch.full((NUM,), -1.0, device=device)
        stream.synchronize()
        del before
        if busy:
            torch.cuda._sleep(LONG)
        sampler.keep(0, AFTER, plan, torch.full((NUM,), 7.0, device=device))


def values_of(sampler: Sampler) -> torch.Tensor:
    [(_, _, values)] = sampler.drain()
    return values


def numbers(values: torch.Tensor) -> list[float]:
    return np.frombuffer(values.cpu().numpy().tobytes(), dtype=np.float32).tolist()


def test_what_a_busy_side_stream_computes_is_waited_for() -> None:
    sampler = Sampler(Registry(lambda _: None, 0))
    kept_on(torch.cuda.Stream(), sampler, busy=True)
    assert numbers(values_of(sampler)) == [7.0] * NUM


def test_memory_of_a_side_stream_is_not_used_again_before_it_was_read() -> None:
    sampler, side = Sampler(Registry(lambda _: None, 0)), torch.cuda.Stream()
    kept_on(side, sampler, busy=False)
    side.synchronize()
    torch.cuda._sleep(LONG)  # the main stream, which then reads
    values = values_of(sampler)
    with torch.cuda.stream(side):
        others = [torch.full((NUM,), -1.0, device=side.device) for _ in range(4)]
        side.synchronize()
    assert numbers(values) == [7.0] * NUM
    assert len(others) == 4
