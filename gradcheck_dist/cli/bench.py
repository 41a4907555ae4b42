"""gradcheck bench"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Annotated, Any

import typer

from gradcheck_dist.cli.output import DataFormat
from gradcheck_dist.cli.progress import Progress
from gradcheck_dist.errors import GradcheckError

HELP_ROUNDS = 5
TIMEOUT_S = 600


def bench(
    rounds: Annotated[int, typer.Option(min=2, metavar="N", help="Rounds; more take longer and spread less.")] = 9,
    form: Annotated[DataFormat, typer.Option("--format", help="How to write it.")] = DataFormat.text,
) -> None:
    """Measure what recording and judging cost on this machine.

    Ratios of steps that alternate within one run, on a small model where the cost weighs most. Takes some seconds.
    """
    import json

    with Progress("training a small model with and without recording"):
        found = _measure(rounds)
        found["help_times_python"] = _help_ratio()
    if form == DataFormat.json:
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(f"a step of a small model: {found['plain_ms']:.2f} ms of CPU (torch {found['torch']}, one thread)")
    for way, (low, median, high) in found["ratios"].items():
        typer.echo(f"  recording {way:<27} {median:.3f} times the step [{low:.3f}, {high:.3f}]")
    typer.echo(f"trace: {found['trace_bytes_per_step'] / 1e3:.0f} kB a step with samples")
    typer.echo(
        f"judging: {found['judge_ms_per_step']:.0f} ms a step, {found['times_the_read']:.0f} times the bare read"
    )
    typer.echo(f"gradcheck --help: {found['help_times_python']:.1f} times a bare Python")


def _measure(rounds: int) -> dict[str, Any]:
    """In a process of its own: this one has no torch."""
    import json

    command = [sys.executable, "-m", "gradcheck_dist.measure", str(rounds)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    except subprocess.TimeoutExpired:
        raise GradcheckError(
            f"measuring took longer than {TIMEOUT_S} s. Try --rounds 2, on a machine that is less busy.", code="E717"
        ) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise GradcheckError(f"measuring failed: {last[0]}. `gradcheck doctor` tells what works here.", code="E717")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _help_ratio() -> float:
    import statistics

    def wall_s(*arguments: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    pairs = [(wall_s("-m", "gradcheck_dist", "--help"), wall_s("-c", "pass")) for _ in range(HELP_ROUNDS)]
    return statistics.median(ours / bare for ours, bare in pairs)
