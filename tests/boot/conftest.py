"""`gradcheck run` on small scripts, as a user starts it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

TRAINER = """
import os, sys, torch
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
model = torch.nn.Linear(8, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps=5, accumulation=2, divide=True, before=lambda step, k: None):
    for step in range(steps):
        for k in range(accumulation):
            before(step, k)
            loss = cross_entropy(model(torch.randn(4, 8)), torch.randint(5, (4,)))
            (loss / accumulation if divide else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@dataclass
class Outcome:
    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def traces(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("rank-*.trace"))


Run = Callable[..., Outcome]


def start(
    folder: Path,
    code: str,
    *arguments: str,
    options: tuple[str, ...] = (),
    command: tuple[str, ...] = (sys.executable,),
    env: dict[str, str] | None = None,
    prelude: str = TRAINER,
) -> Outcome:
    """A script of `prelude` and `code` below `gradcheck run`, in `folder`."""
    script, run_dir = folder / "train.py", folder / "run"
    script.write_text(prelude + code)
    own = [sys.executable, "-m", "gradcheck_dist", "run", "--out", str(run_dir), *options, "--"]
    done = subprocess.run(
        [*own, *command, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    return Outcome(done.returncode, done.stdout, done.stderr, run_dir)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`start` in the test's own folder."""
    return functools.partial(start, tmp_path)
