"""Running a client's script as it is, below `gradcheck run`, and with its seeded fault.

Or, for scripts that need torch alone, in ranks that are forked from a process that has torch loaded: the same script,
probes and judgement, in little time: most of it goes into starting processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradcheck_dist.reports import formats
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
_EXIT_ABORT = "terminate called without an active exception"
"""torch 2.13 with gloo now and then aborts while the interpreter shuts down, after everything is done."""


TIMEOUT_S, GRACE_S = 240, 40


@dataclass(frozen=True)
class Client:
    """A script of examples/, how it is started, the fault it can be given, and what must then be found.

    `fault` None: what must be found is in the client as it was released. `beside`: an environment inside this one,
    made by `make clients`, that holds another release than the one installed. `judged` is what a correct run is called.
    """

    script: str
    fault: str | None
    code: str
    expression: str | None
    line: str
    nproc: int = 0
    env: dict[str, str] = field(default_factory=dict)
    needs: str = "torch"
    args: tuple[str, ...] = ()
    beside: str | None = None
    judged: str = "clean"

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.env.items())
        degrees = "".join(
            f" {name.rpartition('.')[2]}={value}" for name, value in zip(self.args[::2], self.args[1::2], strict=True)
        )
        words = [self.script.removesuffix(".py"), *([self.beside] if self.beside else [])]
        return (
            f"{' '.join(words)}{f' x{self.nproc}' if self.nproc else ''}{options}{degrees} {self.fault or ''}".strip()
        )

    @property
    def python(self) -> str:
        return sys.executable if self.beside is None else str(Path(sys.prefix) / self.beside / "bin" / "python")

    def command(self, logs: str) -> list[str]:
        """Below torchrun each rank writes a file of its own in `logs`: in one pipe their lines may run together."""
        options = ["--nproc-per-node", str(self.nproc), "--log-dir", logs, "--redirects", "1"]
        launcher = ["-m", "torch.distributed.run", *options] if self.nproc else []
        return [self.python, *launcher, str(EXAMPLES / self.script), *self.args]

    @property
    def missing(self) -> str | None:
        """What is not installed, None when the client can run."""
        if self.beside is not None and not (Path(sys.prefix) / self.beside).is_dir():
            return self.beside
        return None if importlib.util.find_spec(self.needs) is not None else self.needs

    @property
    def environment(self) -> dict[str, str]:
        """Without what the tests' own process was told; one thread a process."""
        found = {name: value for name, value in os.environ.items() if name not in ("FAULT", "GRADCHECK_BOOT")}
        return found | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.env}


@dataclass
class Trained:
    """The line that a script prints about its parameters, and the report, when there was one."""

    parameters: str
    report: dict[str, Any]


def train(client: Client, folder: Path | None, fault: bool = False) -> Trained:
    """Train once; below `gradcheck run` when a folder is given."""
    own: list[str] = []
    report = Path(f"{folder}.json")
    if folder is not None:
        own = [client.python, "-m", "gradcheck_dist", "run", "--out", str(folder), "--report", str(report), "--"]
    environment = client.environment | ({"FAULT": client.fault} if fault and client.fault else {})
    with tempfile.TemporaryDirectory() as logs:
        code, stdout, stderr = _run([*own, *client.command(logs)], environment)
        if client.nproc:
            stdout = "".join(path.read_text() for path in sorted(Path(logs).rglob("0/stdout.log")))
    printed = re.findall(r"^parameters .*$", stdout, re.MULTILINE)
    assert printed, f"exit code {code}\n{stderr[-3000:]}"
    assert code == 0 or _EXIT_ABORT in stderr, stderr[-3000:]
    return Trained(printed[0], json.loads(report.read_text()) if folder is not None else {})


def train_forked(client: Client, folder: Path, *, recorded: bool = True, fault: bool = False) -> Trained:
    """What `train` does, of a client that needs torch alone; the ranks' output stands in `<folder>-logs`."""
    logs = Path(f"{folder}-logs")
    environment = client.env | ({"FAULT": client.fault} if fault and client.fault else {})
    script = (str(EXAMPLES / client.script), client.args, str(folder) if recorded else None, not client.nproc)
    launch("forked_script:run_script", script, max(client.nproc, 1), timeout_s=100, log_dir=logs, env=environment)
    [printed] = re.findall(r"^parameters .*$", (logs / "rank_0.stdout.log").read_text(), re.MULTILINE)
    return Trained(printed, json.loads(formats.write(diagnose_run(folder), "json")) if recorded else {})


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). A command that is given up is asked to end first: torchrun then ends its ranks,
    which are sessions of their own."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.terminate()
            try:
                process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return process.returncode, stdout, stderr


def source_line(finding: dict[str, Any]) -> str:
    """The source line that a finding points at."""
    event = finding["first_event"]
    return Path(event["file"]).read_text().splitlines()[event["line"] - 1].strip()
