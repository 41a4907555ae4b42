"""Variants that ranks train twice, without probes and with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch


def in_memory(run: Path) -> Report:
    return diagnose(read_run(run))


def judged_beside(
    folders: pytest.TempPathFactory,
    worker: str,
    variants: Iterable[str],
    num_ranks: int = 2,
    judge: Callable[[Path], Report] = in_memory,
) -> dict[str, Report]:
    """Train every variant, hold that probes changed no bit of it, and judge what they recorded."""
    folder = folders.mktemp("variants")
    checksums = launch(worker, (str(folder),), num_ranks, timeout_s=100)
    assert all(plain == recorded for of_rank in checksums for plain, recorded in of_rank)
    return {variant: judge(folder / variant) for variant in variants}
