"""Scalars by step and the report as a run of MLflow, in a folder that `mlflow ui --backend-store-uri` shows."""

from __future__ import annotations

import os
from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.exports.scalars import by_step, facts
from gradcheck_dist.reports.text import printable
from gradcheck_dist.trace.run import Run


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Add a run to the store in the folder `output`, or to that of MLFLOW_TRACKING_URI.

    Raises:
        GradcheckError: E706 mlflow is not installed.
    """
    try:
        # Plain files are enough for one run, and need no database; the switch has to be set before the store opens.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric
    except ImportError as error:
        raise GradcheckError(
            "MLflow's package is not installed: `pip install mlflow-skinny`, or use --format tensorboard.", code="E706"
        ) from error
    output.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or output.resolve().as_uri())
    experiment = client.get_experiment_by_name("gradcheck")
    number = experiment.experiment_id if experiment is not None else client.create_experiment("gradcheck")
    started = client.create_run(number, run_name=printable(report.run.id, 80))
    ended_ms = started.info.start_time
    for name, value in facts(report).items():
        client.log_param(started.info.run_id, name, value)
    metrics = [
        Metric(_legal(name), value, ended_ms, step)
        for step, values in by_step(report, run).items()
        for name, value in values.items()
    ]
    client.log_batch(started.info.run_id, metrics=metrics)
    client.log_text(started.info.run_id, markdown.render(report), "gradcheck.md")
    client.set_terminated(started.info.run_id)
    return [output]


def _legal(name: str) -> str:
    """MLflow takes letters, digits and a few signs in the names of metrics."""
    return "".join(char if char.isalnum() or char in "_-./ " else "_" for char in name)
