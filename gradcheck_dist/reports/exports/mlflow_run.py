"""Scalars by step and the report as a run of MLflow: `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db` shows it.

MLflow's small package (mlflow-skinny) has no database: there it is a store of files, which needs
MLFLOW_ALLOW_FILE_STORE=true to be opened.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.exports.scalars import by_step, facts
from gradcheck_dist.reports.text import printable
from gradcheck_dist.trace.run import Run

BATCH = 1000
"""Metrics that MLflow takes at once."""


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Add a run to the database or files in the folder `output`, or to the store of MLFLOW_TRACKING_URI.

    Raises:
        GradcheckError: E706 mlflow is not installed.
    """
    try:
        store, artifacts = _store(output)
        from mlflow import MlflowClient
        from mlflow.entities import Metric
    except ImportError as error:
        raise GradcheckError(
            "MLflow's package is not installed: `pip install mlflow-skinny`, or use --format tensorboard.", code="E706"
        ) from error
    output.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("gradcheck")
    number = experiment.experiment_id if experiment else client.create_experiment("gradcheck", artifacts)
    started = client.create_run(number, run_name=printable(report.run.id, 80))
    ended_ms = started.info.start_time
    for name, value in facts(report).items():
        client.log_param(started.info.run_id, name, value)
    metrics = [
        Metric(_legal(name), value, ended_ms, step)
        for step, values in by_step(report, run).items()
        for name, value in values.items()
    ]
    for first in range(0, len(metrics), BATCH):
        client.log_batch(started.info.run_id, metrics=metrics[first : first + BATCH])
    client.log_text(started.info.run_id, markdown.render(report), "gradcheck.md")
    client.set_terminated(started.info.run_id)
    return [output]


def _store(output: Path) -> tuple[str, str | None]:
    """Where runs go, and where their files go; None leaves that to the store."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        return given, None
    if all(importlib.util.find_spec(package) for package in ("sqlalchemy", "alembic")):
        return f"sqlite:///{output.resolve() / 'mlflow.db'}", (output.resolve() / "artifacts").as_uri()
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # has to be set before the store opens
    return output.resolve().as_uri(), None


def _legal(name: str) -> str:
    """MLflow takes letters, digits and a few signs in the names of metrics."""
    return "".join(char if char.isalnum() or char in "_-./ " else "_" for char in name)
