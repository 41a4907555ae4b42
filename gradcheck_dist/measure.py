"""What recording costs on this machine: `python -m gradcheck_dist.measure` prints JSON for `gradcheck bench`.

A small model (39 parameters, where Python weighs most), one process, one thread. Steps with and without recording
alternate block by block, so that what slows the machine down for a while weighs on both; CPU time of the process.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS_A_BLOCK = 6


def measure(rounds: int) -> dict[str, Any]:
    """Ratios of a recorded step to a plain one (medians and quartiles of `rounds`), bytes, and the time to judge."""
    import torch

    torch.set_num_threads(1)
    step = _step()
    ways: dict[str, dict[str, Any] | None] = {
        "plain": None,
        "every step with samples": {},
        "every step without samples": {"steps": range(0), "every_step": True},
        "between recorded steps": {"steps": {0}},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(rounds):
            for way, options in list(ways.items())[:: 1 if round_ % 2 == 0 else -1]:
                times[way].append(_block(step, options, folder / f"{way} {round_}"))
        run = folder / f"every step with samples {rounds - 1}"
        num_bytes = sum(path.stat().st_size for path in run.glob("*.trace"))
        judged_s, read_s = _judge(run)
    plain = times.pop("plain")
    return {
        "plain_ms": statistics.median(plain) * 1e3,
        "ratios": {way: _ratio(values, plain) for way, values in times.items()},
        "trace_bytes_per_step": num_bytes / (STEPS_A_BLOCK + 2),
        "judge_ms_per_step": judged_s / (STEPS_A_BLOCK + 2) * 1e3,
        "times_the_read": judged_s / read_s,
        "torch": str(torch.__version__),
    }


def _step() -> Callable[[], None]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = torch.randint(0, 256, (2, 2, 32))

    def step() -> None:
        loss: Any = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def _block(step: Callable[[], None], options: dict[str, Any] | None, run: Path) -> float:
    """CPU seconds a step of some steps; two more before them are not counted."""
    import contextlib

    from gradcheck_dist.probes.session import attach

    with attach(run, **options) if options is not None else contextlib.nullcontext():
        step()
        step()
        start = time.process_time()
        for _ in range(STEPS_A_BLOCK):
            step()
        return (time.process_time() - start) / STEPS_A_BLOCK


def _judge(run: Path) -> tuple[float, float]:
    """CPU seconds of judging a run, and of reading its bytes."""
    from gradcheck_dist.stream.diagnose import diagnose_run

    start = time.process_time()
    diagnose_run(run)
    judged = time.process_time() - start
    start = time.process_time()
    for _ in range(100):
        for path in run.glob("*.trace"):
            path.read_bytes()
    return judged, (time.process_time() - start) / 100


def _ratio(values: list[float], plain: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile of the rounds' ratios."""
    ratios = [value / base for value, base in zip(values, plain, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive")


if __name__ == "__main__":
    json.dump(measure(int(sys.argv[1])), sys.stdout)
