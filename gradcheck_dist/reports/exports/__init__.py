"""A judged run for other programs: tables, a timeline, scalars. `write` knows every format."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from gradcheck_dist.errors import unknown_value

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report
    from gradcheck_dist.trace.run import Run

MODULES = {
    "csv": "csv_files",
    "parquet": "parquet",
    "perfetto": "perfetto",
    "tensorboard": "tensorboard_log",
    "wandb": "wandb_run",
    "mlflow": "mlflow_run",
}


def write(report: Report, run: Run | None, form: str, output: Path) -> list[Path]:
    """Write a run in one of the formats; the files that were written.

    Raises:
        GradcheckError: E706 unknown format, or the package that writes it is missing.
    """
    if form not in MODULES:
        raise unknown_value("format", form, MODULES, code="E706")
    module = importlib.import_module(f"{__name__}.{MODULES[form]}")
    written: list[Path] = module.write(report, run, output)
    return written
