"""Curves out of whatever a job left behind: a run folder, a JSON report, a TensorBoard log folder, a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradcheck_dist.compare import names
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.text import printable

MAX_CSV_BYTES = 500_000_000

Curve = dict[int, float]
"""Value by step; only finite values."""


@dataclass(frozen=True)
class Source:
    """One job's curves by role (loss, grad_norm, tokens). `tags` says under which name each was found, `verdict` what
    gradcheck says of a job that it recorded."""

    name: str
    curves: dict[str, Curve]
    tags: dict[str, str]
    axes: dict[str, float] = field(default_factory=dict)
    verdict: str = ""


def read_all(paths: Sequence[Path], wanted: Mapping[str, str | None]) -> list[Source]:
    """Read jobs, each called by as much of the end of its path as tells it from the others."""
    parts = [path.absolute().parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(set(parts)) and length < 20:
        length += 1
    named = ["/".join(part[-length:]) for part in parts]
    return [replace(read(path, wanted), name=printable(name, 80)) for path, name in zip(paths, named, strict=True)]


def read(path: Path, wanted: Mapping[str, str | None]) -> Source:
    """Read one job's curves. `wanted` names curves by role where the choice by looks would be wrong.

    FILE.csv#RUN is one run of a CSV whose columns are called "RUN - name", as Weights & Biases exports several runs.

    Raises:
        GradcheckError: E911 nothing that can be read, E912 no such curve.
    """
    axes: dict[str, float] = {}
    verdict = ""
    if path.is_dir() and any(path.glob("rank-*.trace")):
        from gradcheck_dist.stream.diagnose import diagnose_run

        every, axes, verdict = _of_report(diagnose_run(path))
    elif path.is_dir():
        from gradcheck_dist.compare.tensorboard_log import read_folder

        every = read_folder(path)
    elif path.suffix == ".json" and path.is_file():
        from gradcheck_dist.diagnosis.finding import Report
        from gradcheck_dist.reports.json_report import decode

        report = decode(path.read_bytes(), str(path))
        if not isinstance(report, Report):
            raise GradcheckError(f"{path} holds several runs. Name the run folder of one of them.", code="E911")
        every, axes, verdict = _of_report(report)
    elif "tfevents" in path.name:
        from gradcheck_dist.compare.tensorboard_log import read_file

        every = read_file(path)
    else:
        file, _, run = str(path).partition("#") if not path.exists() else (str(path), "", "")
        every = _of_run(read_csv(Path(file)), run, file)
    tags = {role: names.find(role, every, wanted.get(role)) for role in names.ROLES}
    found = {role: tag for role, tag in tags.items() if tag is not None}
    if not found:
        if not every:
            raise GradcheckError(
                f"{path} has no curve of numbers. Name a run folder, a TensorBoard log folder, a JSON report or a CSV "
                "file whose first line names its columns.",
                code="E911",
            )
        shown = ", ".join(printable(name, 60) for name in sorted(every)[:8])
        raise GradcheckError(
            f"{path} has no curve that looks like a loss or a gradient norm; it has {shown}. Name them with "
            "--loss NAME and --grad-norm NAME.",
            code="E911",
        )
    curves = {role: every[tag] for role, tag in found.items()}
    return Source(printable(path.name or str(path), 60), curves, found, axes, verdict)


def _of_run(every: dict[str, Curve], run: str, file: str) -> dict[str, Curve]:
    """The columns of one run; without a name there must be only one."""
    runs = sorted({name.rpartition(" - ")[0] for name in every if " - " in name})
    if not run and len(runs) <= 1:
        return every
    if run not in runs:
        shown = ", ".join(printable(name, 40) for name in runs[:8]) or "(none)"
        raise GradcheckError(
            f"{file} holds the runs {shown}; name one of them as {file}#{printable(runs[0], 40) if runs else 'RUN'}.",
            code="E911",
        )
    return {name: curve for name, curve in every.items() if name.rpartition(" - ")[0] in (run, "")}


def _of_report(report: object) -> tuple[dict[str, Curve], dict[str, float], str]:
    from gradcheck_dist.diagnosis.finding import Report
    from gradcheck_dist.reports.document import build

    assert isinstance(report, Report)
    curves = {}
    for name in report.metrics:
        pairs = report.series(name)
        curves[name] = {step: value for step, value in pairs if value is not None and math.isfinite(value)}
    axes = {axis: float(degree) for axis, degree in report.run.axes.items() if degree > 1}
    return curves, axes, build(report).headline


def read_csv(path: Path) -> dict[str, Curve]:
    """The columns of a CSV file by step. The step is the column of that name, else the number of the row.

    Raises:
        GradcheckError: E911 no such file, or nothing in it is a table of numbers.
    """
    try:
        if path.stat().st_size > MAX_CSV_BYTES:
            raise GradcheckError(f"{path} is larger than {MAX_CSV_BYTES // 10**6} MB; cut it first.", code="E911")
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.reader(file)
            head = next(rows, [])
            at = next((index for index, name in enumerate(head) if names.plain(name) in names.STEP_NAMES), None)
            curves: dict[str, Curve] = {name: {} for name in head}
            for count, row in enumerate(rows):
                step = _number(row[at]) if at is not None and at < len(row) else float(count)
                if step is None:
                    continue
                for index, (name, text) in enumerate(zip(head, row, strict=False)):
                    value = _number(text) if index != at else None
                    if value is not None:
                        curves[name][int(step)] = value
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise GradcheckError(
            f"cannot read {path}: {reason}. Name a run folder, a TensorBoard log folder, a JSON report or a CSV file.",
            code="E911",
        ) from error
    return {name: curve for name, curve in curves.items() if curve}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
