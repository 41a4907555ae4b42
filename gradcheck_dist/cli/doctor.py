"""gradcheck doctor"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from gradcheck_dist.cli.output import DataFormat, beside
from gradcheck_dist.cli.progress import Progress

TORCH_TIMEOUT_S = 90.0
MIN_FREE_BYTES = 1_000_000_000


@dataclass(frozen=True)
class Check:
    """One thing that works, or why not. What is not `needed` limits what can be recorded here and nothing else."""

    what: str
    works: bool
    detail: str
    needed: bool = True


def doctor(form: Annotated[DataFormat, typer.Option("--format", help="How to write it.")] = DataFormat.text) -> None:
    """Tell what works on this machine.

    Looks at Python, torch, back ends, devices, ports, disk and probes.

    Exit codes: 0 scenarios can run here, 1 something that they need does not work.
    """
    with Progress("asking torch") as progress:
        checks = [_python(), _ports(), _disk(), _samples()]
        progress.update("asking torch (the first import can take a while)")
        checks += _torch()
    if form == DataFormat.json:
        import json

        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}, indent=1))
    else:
        for check in _shown(checks):
            sign = "ok" if check.works else "FAILS" if check.needed else "no"
            typer.echo(beside(f"{sign:<6} {check.what:<22} ", check.detail))
    raise typer.Exit(int(any(check.needed and not check.works for check in checks)))


def _shown(checks: list[Check]) -> list[Check]:
    """Probes that work are one line; one that does not has its own."""
    probes = [check for check in checks if check.what.startswith("probe ")]
    well = [check for check in probes if check.works]
    others = [check for check in checks if check not in well]
    if not well:
        return others
    return [*others, Check("probes", True, f"{len(well)} of {len(probes)} can hook into this torch", needed=False)]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), f"{version} (3.11 or newer is needed)")


def _ports() -> Check:
    import socket

    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check("ports", True, f"a listening socket on 127.0.0.1:{server.getsockname()[1]} could be opened")
    except OSError as error:
        return Check("ports", False, f"no listening socket on 127.0.0.1: {error}. Ranks cannot find each other.")


def _disk() -> Check:
    import shutil
    import tempfile

    folder = tempfile.gettempdir()
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"gradcheck")
    except OSError as error:
        return Check("disk", False, f"{folder} cannot be written: {error}. Set TMPDIR to a folder that can.")
    return Check("disk", free >= MIN_FREE_BYTES, f"{free / 1e9:.1f} GB free in {folder} (1 GB is needed)")


def _samples() -> Check:
    """What the sampling plan leaves out of large models."""
    from gradcheck_dist.probes.parameters.budget import BUDGET_BYTES, NUM_CONTRIBUTIONS, sampling_plan

    full = max(count for count in range(1, 4096) if sampling_plan(count, 96).elements == 96)
    whole = max(count for count in range(1, 4096) if sampling_plan(count, 96).period == 1)
    return Check(
        "samples",
        True,
        f"at most {BUDGET_BYTES >> 20} MiB a recorded step and rank ({NUM_CONTRIBUTIONS} contributions): 96 elements "
        f"of up to {full} parameters, fewer of up to {whole}; more take turns from step to step",
    )


def _torch() -> list[Check]:
    """Torch is asked in a process of its own, line by line: whatever it does, this command answers."""
    import json
    import subprocess

    command = [sys.executable, "-m", "gradcheck_dist.scenarios.selftest"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False)
        output, trouble = done.stdout, done.stderr.strip().splitlines()
        ended = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ended, trouble = f"no answer within {TORCH_TIMEOUT_S:g} s", []
    checks = [Check(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    if ended:
        last = f": {trouble[-1]}" if trouble else ""
        checks.append(Check("torch self-test", False, f"{ended} after {checks[-1].what if checks else 'start'}{last}"))
    return checks
