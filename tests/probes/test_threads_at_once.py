"""Threads of one process: those that take turns in one training are judged, those that train at once accuse nobody."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import TRAIN_AT_ONCE, AnyRecord, ParamSet, Plan
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.parameters.registry import Registry
from gradcheck_dist.probes.recording.samples import Sampler
from gradcheck_dist.trace.run import read_run

STEPS = 4
NUM_THREADS = 8


def interrupted(_: FrameType, __: str, ___: Any) -> Any:
    """A trace function that lets other threads run before each line of the probes."""
    time.sleep(0)
    return interrupted


def trainer(seed: int, divisor: int = 2) -> tuple[Callable[[], None], Callable[[], None]]:
    torch.manual_seed(seed)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def pass_() -> None:
        loss = nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(5, (8,)))
        (loss / divisor).backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return pass_, step


def test_two_models_that_two_threads_train_at_once_accuse_nobody(tmp_path: Path) -> None:
    with attach(tmp_path / "run", steps=range(STEPS)), ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        (first, step_first), (second, step_second) = trainer(0), trainer(1)
        for _ in range(STEPS):
            for pool, call in (
                (one, first), (other, second), (one, first), (one, step_first), (other, second), (other, step_second),
            ):  # fmt: skip
                pool.submit(call).result()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert TRAIN_AT_ONCE in report.reasons


def test_passes_of_two_threads_that_overlap_accuse_nobody(tmp_path: Path) -> None:
    """A hook of the one waits until the other's pass is over."""
    with attach(tmp_path / "run", steps=range(1)), ThreadPoolExecutor(1) as other:
        (first, step), (second, _) = trainer(0), trainer(1)
        hidden = torch.zeros(1, requires_grad=True)
        begun = hidden.clone()
        begun.register_hook(lambda grad: other.submit(second).result() or grad)
        first()
        begun.sum().backward()
        step()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert TRAIN_AT_ONCE in report.reasons


def test_threads_that_take_turns_in_one_training_are_judged(tmp_path: Path) -> None:
    for divisor, verdict in ((2, "clean"), (4, "findings")):
        run = tmp_path / verdict
        with attach(run, steps=range(STEPS)), ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            pass_, step = trainer(0, divisor)
            for _ in range(STEPS):
                for pool, call in ((one, pass_), (other, pass_), (other, step)):
                    pool.submit(call).result()
        assert diagnose(read_run(run)).verdict == verdict


def test_what_threads_keep_at_once_is_not_mixed() -> None:
    """As a pool does to which a program hands each parameter's reduction (BNS-GCN)."""
    written: list[AnyRecord] = []
    registry = Registry(written.append, sample_size=4)
    model = nn.ModuleList(nn.Linear(3, 2) for _ in range(16))
    infos = list(registry.add_root(model))
    sampler = Sampler(registry)

    def keep(number: int) -> None:
        sys.settrace(interrupted)
        for info in infos[number::NUM_THREADS]:
            sampler.sample(0, 1, info, torch.full(info.shape, float(info.id)))
            registry.param_set([info])

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(keep, range(NUM_THREADS)))
    plans = {plan.id: plan for plan in written if isinstance(plan, Plan)}
    sets = {one.id: one.params for one in written if isinstance(one, ParamSet)}
    assert len(plans) == len(infos)
    assert all(sets[registry.param_set([info])] == (info.id,) for info in infos)
    [(_, rows, values)] = sampler.drain()
    found, at = np.frombuffer(rows, "i4").reshape(-1, 4), 0
    kept = values.view(torch.float32)
    assert len(found) == len(infos)
    for _, _, param, plan in found.tolist():
        size = plans[plan].num_values
        assert plans[plan].param == param
        assert (kept[at : at + size] == param).all()
        at += size
